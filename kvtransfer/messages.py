"""What holder and consumer say to each other: exchange.proto as plain values.

consumer → holder: `Open`, then `Pulled`…; holder → consumer: `Accepted`, `Ready`…, `Complete`, and a `Confirmed` for
each `Pulled` that found its pins alive.

Blocks are counted by their index in the request's block table. With more than one KV cache group every group has a
table, and a count of n means the blocks below n of *every* group.
"""

from dataclasses import dataclass

from engine.executor import SampledToken
from engine.sampling_params import SamplingParams
from kvtransfer.handle import PoolHandle
from tandem.v1.sampling_pb2 import PromptLogprobs


@dataclass(frozen=True, slots=True)
class PrefillSource:
    """Compute the KV of these tokens, and sample the next one: for each choice, if there are several."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int  # the tokens after them were generated before: penalties tell them apart
    params: SamplingParams
    skip_blocks: int = 0  # leading blocks that need not be sent
    cache_salt: str = ""
    priority: int = 0
    cached_on_address: str | None = None  # a third worker that holds a longer prefix
    num_cached_blocks: int = 0  # leading full blocks that it is believed to hold
    # Of the choices of one prompt, which differ in nothing else: a next token is sampled for each. Empty: one choice,
    # its seed is in `params`.
    seeds: tuple[int, ...] = ()

    @property
    def num_choices(self) -> int:
        return len(self.seeds) or 1


@dataclass(frozen=True, slots=True)
class CachedSource:
    """Hand out what you have cached of this chain of block hashes."""

    block_hashes: tuple[bytes, ...]
    skip_blocks: int = 0


Source = PrefillSource | CachedSource


@dataclass(frozen=True, slots=True)
class Open:
    """The consumer wants blocks. Its target blocks are reserved already."""

    handoff_id: str  # new for every attempt
    request_id: str
    consumer_instance_id: str
    fingerprint: bytes
    timeout_s: float
    source: Source
    staged: bool = False  # the holder's pool cannot be mapped here: hand out copies in host memory


@dataclass(frozen=True, slots=True)
class Pulled:
    """Copies of the blocks below `num_blocks` have ended."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """Queued, started, or (cached source) found and pinned."""

    num_cached_tokens: int  # cached source: what is really held; prefill: 0, `Complete` says it
    num_blocks: int  # of the whole hand-off, skipped ones included
    lease_s: float  # without progress by the consumer for so long, the holder lets go
    pool: PoolHandle


@dataclass(frozen=True, slots=True)
class Ready:
    """These blocks are filled, visible to the consumer once it has waited for `fence`, and pinned.

    In order, without holes. Work that writes the pool is in one order, so a later fence stands for all before.
    """

    first: int  # index of block_ids[0] in the request's table
    block_ids: tuple[int, ...]
    num_tokens: int  # tokens whose KV is filled so far
    group: int = 0
    fence: int | None = None  # a mark of the pool's memory; None: nothing to wait for


@dataclass(frozen=True, slots=True)
class Complete:
    """All blocks are announced."""

    first_tokens: tuple[SampledToken, ...]  # one a choice, in the order of the seeds; none: cached source
    num_tokens: int
    num_cached_tokens: int = 0  # of these, not computed by the holder for this hand-off
    queued_s: float = 0.0
    prefill_s: float = 0.0
    # If asked for. As it is on the wire: it can be large, and workers only hand it on.
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The pins of the blocks below `num_blocks` lived through the copy: the data is good. They are dropped now."""

    num_blocks: int


ConsumerMessage = Open | Pulled
HolderMessage = Accepted | Ready | Complete | Confirmed


@dataclass(frozen=True, slots=True)
class HandoffTimes:
    """Seconds; outward nested, so that the consumer gives up before the holder stops waiting for it."""

    lease_s: float = 30.0  # holder: for the consumer's next Pulled while blocks are announced
    answer_s: float = 10.0  # consumer: for Accepted, and for Confirmed after Pulled
    deadline_s: float = 120.0  # of a hand-off that names none

    def __post_init__(self) -> None:
        for name in ("lease_s", "answer_s", "deadline_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.answer_s > self.lease_s:
            raise ValueError(f"answer_s ({self.answer_s}) must not be above lease_s ({self.lease_s})")

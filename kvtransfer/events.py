"""What can happen to the two ends of a hand-off (events), and what they want done about it (actions).

Events come from the peer (its messages), from the worker around (through `ports`), and from the clock. Actions are done
in the order given.
"""

from dataclasses import dataclass

from engine.executor import SampledToken
from kvtransfer.errors import Code, TransferError
from kvtransfer.handle import PoolHandle
from kvtransfer.messages import Accepted, Complete, Confirmed, ConsumerMessage, HolderMessage, Pulled, Ready
from tandem.v1.sampling_pb2 import PromptLogprobs

# --- events of both


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The stream is gone, and nothing more is said on it."""

    code: Code
    message: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


# --- events of a holder


@dataclass(frozen=True, slots=True)
class Started:
    """The prefill was scheduled for the first time."""


@dataclass(frozen=True, slots=True)
class Filled:
    """Blocks are filled, and pinned once each for this hand-off (null blocks excepted)."""

    first: int  # index of block_ids[0] in the request's table
    block_ids: tuple[int, ...]
    num_tokens: int  # tokens whose KV is filled so far
    group: int = 0
    fence: int | None = None  # what a reader waits for, see Ready


@dataclass(frozen=True, slots=True)
class CachedPinned:
    """The longest leading cached run, pinned once each; one table a KV cache group."""

    block_tables: tuple[tuple[int, ...], ...]
    fence: int | None = None  # what a reader waits for, see Ready


@dataclass(frozen=True, slots=True)
class Computed:
    """The prefill is over; every block has been reported."""

    first_tokens: tuple[SampledToken, ...]  # one a choice, in the order of the seeds
    num_tokens: int
    num_cached_tokens: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    prompt_logprobs: PromptLogprobs | None = None  # if asked for


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker cannot, or will not."""

    code: Code
    message: str
    refused: bool = False  # before anything was done


WorkerEvent = Started | Filled | CachedPinned | Computed | Failed
HolderEvent = WorkerEvent | Pulled | StreamEnded | Tick


# --- actions of both


@dataclass(frozen=True, slots=True)
class Send:
    """To the peer."""

    message: HolderMessage | ConsumerMessage


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Ends the stream: the holder's end says why, after everything sent before; the consumer's end cancels."""

    code: Code
    message: str = ""


# --- actions of a holder


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """`HolderPort.start_prefill`."""


@dataclass(frozen=True, slots=True)
class PinCached:
    """`HolderPort.pin_cached`."""


@dataclass(frozen=True, slots=True)
class AbortCompute:
    """`HolderPort.abort`."""


@dataclass(frozen=True, slots=True)
class Unpin:
    """`HolderPort.unpin`."""

    block_ids: tuple[int, ...]


HolderAction = Send | CloseStream | StartPrefill | PinCached | AbortCompute | Unpin


# --- events of a consumer


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What the copies of one hand-off were."""

    seconds: float = 0.0
    bytes: int = 0
    segments: int = 0  # runs of consecutive blocks, each one copy

    def __add__(self, other: "TransferStats") -> "TransferStats":
        return TransferStats(self.seconds + other.seconds, self.bytes + other.bytes, self.segments + other.segments)


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """The copy in flight is over, well or not."""

    stats: TransferStats
    error: TransferError | None = None


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """The request is not wanted any more."""


ConsumerEvent = Accepted | Ready | Complete | Confirmed | StreamEnded | CopyEnded | AbortRequested | Tick


# --- actions of a consumer


@dataclass(frozen=True, slots=True)
class HandoffResult:
    """A hand-off that went well."""

    num_blocks: int  # all real; those below skip_blocks were before
    complete: Complete
    stats: TransferStats
    num_stale_blocks: int = 0  # cached source: hoped for, and not held


@dataclass(frozen=True, slots=True)
class HolderLost:
    """A hand-off that did not. Copies have ended; the leading `num_confirmed_blocks` blocks are real and stay."""

    code: Code
    message: str
    num_confirmed_blocks: int
    first_tokens_delivered: bool
    stats: TransferStats
    is_unmappable: bool = False  # nothing else is wrong with the holder, and the next hand-off from it is staged


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy these blocks of the peer's pool into these of our own; then `CopyEnded`."""

    pool: PoolHandle
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    fence: int | None = None  # to be waited for before


@dataclass(frozen=True, slots=True)
class DeliverFirstTokens:
    """`ConsumerPort.first_tokens`."""

    complete: Complete


@dataclass(frozen=True, slots=True)
class CommitBlocks:
    """`ConsumerPort.commit_blocks`."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Last action: `ConsumerPort.committed`."""

    result: HandoffResult


@dataclass(frozen=True, slots=True)
class LoseHolder:
    """Last action: `ConsumerPort.holder_lost`."""

    lost: HolderLost


@dataclass(frozen=True, slots=True)
class End:
    """Last action: `ConsumerPort.ended`."""


ConsumerAction = Send | CloseStream | Copy | DeliverFirstTokens | CommitBlocks | Commit | LoseHolder | End

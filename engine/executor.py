"""Deciding is plain Python, executing is tensors: what crosses between.

The scheduler decides a step as a `SchedulerOutput`; an `Executor` runs it and answers with a `ModelOutput`. It holds no
state of any request: all that a step needs is in its input and in the block pool, so that preemption, prefix hits,
hand-off and migration cannot change a result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from engine.memory import KVLayout, PoolMemory
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class TokenMatcher(Protocol):
    """Holds one sequence to a structure; see `engine.structure`."""

    def allowed(self, output_token_ids: Sequence[int]) -> "npt.NDArray[np.uint32]":
        """Which tokens may follow these: bit `i % 32` of word `i // 32` for token i. At least one is.

        Args:
            output_token_ids: all that the sequence has generated; each was allowed after those before it.
        """
        ...

    @property
    def has_given_up(self) -> bool:
        """Whether the last answer was the end for want of a better one: the text is incomplete, and cannot go on."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """What sampling a request's next token depends on, beside its logits.

    The sequences are the request's own lists, not copies: valid until the step is updated.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    matcher: TokenMatcher | None = None  # of `params.structure`

    @property
    def position(self) -> int:
        """Position of the token to sample; with the seed, the only source of randomness."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: compute the KV of `token_ids`, at positions from `num_computed_tokens` on."""

    request_id: str
    token_ids: Sequence[int]
    num_computed_tokens: int  # before the step: everything below is in the pool already
    block_tables: tuple[Sequence[int], ...]  # block ids, one table a KV cache group
    sampling: SamplingInput | None  # None: nothing is sampled for it: a chunk that does not reach the last token
    is_prompt: bool = False  # begins within the prompt; an executor may compute a single such token as a chunk
    # (request id, input): continuations of this prompt, each of which samples its first token after its last one.
    forks: Sequence[tuple[str, SamplingInput]] = ()
    # The tokens that stand after its leading rows, if their log-probabilities are wanted, and those of how many best.
    prompt_targets: Sequence[int] = ()
    num_prompt_top: int = 0

    @property
    def samplings(self) -> Sequence[tuple[str, SamplingInput]]:
        """All that is sampled from the logits of its last row, with the id that each token is answered under."""
        return self.forks if self.sampling is None else ((self.request_id, self.sampling),)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """A step: its requests (decodes first), to be computed in one batch."""

    requests: tuple[ScheduledRequest, ...]
    # (from, to): blocks to copy, one after the other, before anything is computed. What is written into a block in this
    # step does not reach a copy of it.
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.requests)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, sampled or of a prompt, and its log-probabilities if asked for (log_softmax of the raw logits)."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first, ties by smaller id


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The sampled token of each of the step's `samplings`, by request id."""

    sampled: dict[str, SampledToken] = field(default_factory=dict)
    fence: int | None = None  # the step's work may still run: who reads its blocks waits for this mark of the memory
    prompt_logprobs: dict[str, list[SampledToken]] = field(default_factory=dict)  # of each request's `prompt_targets`


class Executor(Protocol):
    """Runs steps. Implementations: `HashExecutor` (tests, simulation), `TorchExecutor` (the model)."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def layout(self) -> KVLayout:
        """Of the blocks that it reads and writes; known before any memory is."""
        ...

    def bind(self, memory: PoolMemory, num_blocks: int) -> None:
        """Uses `memory` (num_blocks · bytes_per_block bytes) as the pool; called once, before the first step."""
        ...

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Computes the step: copies blocks, fills the KV slots of its tokens, and samples where asked."""
        ...

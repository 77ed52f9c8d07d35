"""What a step tells the worker around the engine."""

from dataclasses import dataclass

from engine.executor import SampledToken
from engine.kvcache.events import KVEvent
from engine.sampling_params import FinishReason


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request's new token."""

    request_id: str
    token: SampledToken
    finish_reason: FinishReason | None  # None: it goes on
    matched_token_id: int | None  # the stop token that ended it
    is_first: bool  # the first token that this engine gives it
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in this engine's prefix cache: 0 <= cached <= prompt
    arrival_time: float  # these two with the caller's own clock after the step: queue, prefill and decode times
    first_scheduled_time: float
    # With the first token, if asked for: of all prompt tokens but the first. Forks of a prompt have the same tuple.
    prompt_logprobs: tuple[SampledToken, ...] | None = None


@dataclass(frozen=True, slots=True)
class FilledBlocks:
    """Blocks of a prefill_only request that are filled now, in order, without holes; those found cached are among them.

    Each carries one pin of its own: give it back by `Engine.unpin`. Full blocks come as chunks end, the last one, if
    it is full only in part, with the first token.
    """

    request_id: str
    group: int  # KV cache group
    first: int  # index of block_ids[0] in the request's block table
    block_ids: tuple[int, ...]
    num_tokens: int  # leading tokens whose KV is in this and earlier reported blocks


@dataclass(frozen=True, slots=True)
class ReceiveTarget:
    """Blocks reserved for a request that receives its KV, for all its tokens so far."""

    request_id: str
    block_tables: tuple[tuple[int, ...], ...]  # one a KV cache group
    num_cached_blocks: int  # leading ones that were in the prefix cache: nothing to receive


@dataclass(frozen=True, slots=True)
class StepResult:
    """All that one step did."""

    started_at: float  # by the caller's clock: what the step admits has waited until then, not until its end
    outputs: tuple[RequestOutput, ...] = ()
    filled: tuple[FilledBlocks, ...] = ()
    fence: int | None = None  # what reads `filled` waits for, see ModelOutput
    received_targets: tuple[ReceiveTarget, ...] = ()
    kv_events: tuple[KVEvent, ...] = ()  # since the last step's, in the order the pool made them
    preempted: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()  # started to compute or to receive for the first time: the end of their queue time
    num_computed_tokens: int = 0

"""What a worker says about one request in flight."""

from dataclasses import dataclass

from cluster.generator import StageTimes
from engine.executor import SampledToken
from engine.sampling_params import FinishReason


@dataclass(frozen=True, slots=True)
class Output:
    """One request's part of an engine step."""

    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None  # None: goes on
    matched_token_id: int | None = None
    num_cached_tokens: int | None = None  # with the first token
    stages: StageTimes | None = None  # with the last


@dataclass(frozen=True, slots=True)
class NeedPrefill:
    """The prefill worker was lost or refused: the request waits for another."""

    reason: str
    num_confirmed_blocks: int
    failed_worker_id: str

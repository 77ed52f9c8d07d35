"""What turns one sequence of prompt tokens into a stream of generated ones.

A request's life, seen from here: validated; admitted under the gateway's bound; its blocks hashed; routed; submitted
to a decode worker, together with the other choices of its prompt; chunks yielded as steps end; and exactly one end: a
chunk with a `finish_reason`, or a `GenerationError`, or the caller closing the iterator, which aborts the request at
its worker. Losing a prefill worker or the decode worker on the way is repaired without the caller noticing, by the rule
that a token is a function of the request alone.

`RoutedGenerator` is the implementation over real workers; everything above (text, HTTP, gRPC) knows this interface
alone.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.errors import InvalidRequest
from cluster.worker_info import WorkerStatus
from engine.executor import SampledToken
from engine.sampling_params import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence to generate. Its parameters are complete: seed drawn, stop tokens resolved, one sequence."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str = ""  # only requests of the same salt share cached blocks
    priority: int = 0  # smaller is sooner
    timeout_s: float | None = None  # None: the gateway's default


def check_priority(priority: int) -> None:
    """
    Raises:
        InvalidRequest: it is no priority of a `SequenceRequest`.
    """
    if not -(2**31) <= priority < 2**31:
        raise InvalidRequest(f"priority must be a 32-bit integer, not {priority}", param="priority")


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Where a request's time went, in seconds, as its decode worker measured it."""

    queued: float
    prefill: float
    transfer: float
    decode: float


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The tokens of one step. The last chunk has a `finish_reason`; it may have no token."""

    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None
    matched_token_id: int | None  # the stop token that ended it; it is in `tokens` as well
    num_cached_tokens: int  # prompt tokens that nobody computed for this request
    prefill_worker: str  # worker id; the decode worker's own if it prefilled
    decode_worker: str
    stages: StageTimes | None = None  # with the last chunk, if the worker said
    # With the first chunk, if asked for: of the prompt's tokens, from the second on.
    prompt_logprobs: tuple[SampledToken, ...] | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the workers serve; they all agree on it."""

    served_model_name: str
    model_path: str
    fingerprint: bytes
    block_size: int  # tokens
    vocab_size: int
    max_model_len: int
    dtype: str


@dataclass(slots=True)
class GeneratorStats:
    """Counted here, exported by `cluster/metrics.py`. Everything but `num_active` only grows.

    How sequences end is counted there: a stop string ends one that the generator only sees closed.
    """

    num_active: int = 0  # told by GetServerInfo
    queue_full: int = 0  # refused here, at the gateway's own bound
    repairs: int = 0  # another prefill worker was named for a request in flight
    resubmissions: int = 0  # a request was moved to another decode worker
    local_fallbacks: int = 0  # prefilled on the decode worker for want of a prefill worker
    stale_hits: int = 0  # fewer tokens were cached than the directory had said
    planned_cached_tokens: int = 0  # prompt tokens that plans found cached, on the decode worker or elsewhere


class Generator(Protocol):
    """Generates sequences. `RoutedGenerator` in production, a script in tests of what is above."""

    @property
    def model(self) -> ServedModel:
        """Raises `NoWorker` until the first worker has been reached."""
        ...

    @property
    def stats(self) -> GeneratorStats: ...

    @property
    def max_concurrent(self) -> int:
        """Sequences that may be in flight; a call of more can never be served."""
        ...

    def admit(self, requests: Sequence[SequenceRequest]) -> AbstractContextManager[None]:
        """Takes a place for each sequence of a call, before any of them is started; the `with` block's end frees them.

        A sequence that is generated without is admitted by itself.

        Raises:
            GenerationError: on entering: one of them cannot be served, or there is no room for all; no place is taken.
        """
        ...

    def generate(self, request: SequenceRequest) -> AsyncGenerator[SequenceChunk, None]:
        """Yields the sequence's chunks. Leaving the iteration early (aclose, cancellation) aborts the request.

        Wrap it in `contextlib.aclosing` where iteration may stop early: an async generator that is merely dropped is
        closed only when it is collected.

        Raises:
            GenerationError: at the first `__anext__` if nothing could be started, later if it could not be finished.
        """
        ...

    def generate_choices(self, requests: Sequence[SequenceRequest]) -> list[AsyncGenerator[SequenceChunk, None]]:
        """The choices of one prompt, which share its computation: for each, in order, what `generate` yields.

        Whichever is read first begins all. Read them side by side: the first tokens of all come together, and a prefill
        worker that is lost is replaced by way of one of them. Each may be closed by itself, also before it is begun,
        and the others go on.

        Raises:
            ValueError: they differ in more than their ids and seeds.
        """
        ...

    async def wait_ready(self) -> None:
        """Returns once a request can be served: a decode worker is there."""
        ...

    def workers(self) -> Sequence[WorkerStatus]:
        """Every worker that the gateway was told of, ready or not, with its load."""
        ...


def check_choices(requests: Sequence[SequenceRequest]) -> None:
    """
    Raises:
        ValueError: these are no choices of one prompt: they differ in more than their ids and seeds.
    """
    first = requests[0]
    for request in requests[1:]:
        params = replace(request.params, seed=first.params.seed)
        if replace(request, request_id=first.request_id, params=params) != first:
            raise ValueError(f"{request.request_id} and {first.request_id} are no choices of one prompt")
    if len({request.request_id for request in requests}) < len(requests):
        raise ValueError(f"two of {len(requests)} choices have the same id")

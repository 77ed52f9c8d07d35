"""One sequence on its way through the cluster, repaired where it breaks.

    submit ──> stream of outputs ──> last output
      ^              │
      │              ├── NeedPrefill: the prefill worker was lost ──> assign another, or none: prefill locally
      └── resume ────┴── WorkerLost, QueueFull: the decode worker was ──> submit the rest elsewhere

What has been delivered is never sent again: the resumed request carries it, and goes on behind it, identically, because
a token is a function of the request alone. Both repairs are bounded. The run ends once: by its last output, by an
error, or by its reader leaving; in each case the worker forgets the sequence and its account is settled.

Choices of one prompt begin together (`PromptRun`). A prefill worker that is lost is replaced for all of them, by the
one that the decode worker asks; after a lost decode worker those that had begun go each its own way.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from cluster.attempt import Attempt
from cluster.errors import Cancelled, GenerationError, Leg, NoWorker, QueueFull, WorkerFailed, WorkerLost
from cluster.generator import SequenceChunk, SequenceRequest
from cluster.prompt_run import PromptRun, shutting_down
from cluster.request_stream import RequestStream
from cluster.session_messages import NeedPrefill, Output
from engine.executor import SampledToken
from engine.sampling_params import FinishReason


@dataclass(frozen=True, slots=True)
class RunLimits:
    """How often, and for how long, a request is tried."""

    max_repairs: int = 3  # prefill workers lost
    max_resubmissions: int = 3  # decode workers lost
    timeout_s: float = 600.0  # for requests that name none

    def __post_init__(self) -> None:
        for name in ("max_repairs", "max_resubmissions"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0 seconds, not {self.timeout_s}")


class RequestRun:
    """One sequence's life.

    Args:
        prompt: that it continues, alone or with others.
    """

    def __init__(self, request: SequenceRequest, prompt: PromptRun, limits: RunLimits) -> None:
        self._request = request
        self._prompt = prompt
        self._limits = limits
        self._has_begun = False
        self._at: tuple[Attempt, RequestStream] | None = None  # where it is now
        self._num_left = 0  # number of the attempt that it has left last
        self._delivered: list[int] = []
        self._num_cached_tokens: int | None = None

    async def chunks(self) -> AsyncGenerator[SequenceChunk, None]:
        """The sequence, to its end.

        Raises:
            GenerationError: it could not be finished.
        """
        prompt = self._prompt
        self._has_begun = True
        timer = prompt.clock.call_at(prompt.deadline, self._expire)
        try:
            self._at = attempt, stream = prompt.begin(self._request)
            while True:
                try:
                    message = await stream.next()
                except (WorkerLost, QueueFull) as error:
                    self._at = attempt, stream = self._move(attempt, error)
                    continue
                if isinstance(message, NeedPrefill):
                    self._repair(attempt, stream, message)
                    continue
                if message.finish_reason is FinishReason.ABORT:
                    raise _given_up(attempt)
                yield self._chunk(attempt, message)
                if message.finish_reason is not None:
                    return
        finally:
            timer.cancel()
            self._end()

    def close(self) -> None:
        """Ends it even if it was never begun. Idempotent."""
        if not self._has_begun:
            self._has_begun = True
            self._end()

    # --- its steps

    def _move(self, attempt: Attempt, error: WorkerLost | QueueFull) -> tuple[Attempt, RequestStream]:
        """Submits the rest to another decode worker."""
        prompt = self._prompt
        self._leave(error)
        if prompt.membership.is_closed:
            raise shutting_down() from error  # the worker was not lost: we have let go of it
        if attempt.number > self._limits.max_resubmissions:
            raise _told_why(error, f"the request had been moved {self._limits.max_resubmissions} times before")
        try:
            moved = prompt.move(self._request, self._delivered, attempt)
        except NoWorker as nobody:
            raise _told_why(error, nobody.message) from error
        prompt.stats.resubmissions += 1
        return moved

    def _repair(self, attempt: Attempt, stream: RequestStream, need: NeedPrefill) -> None:
        """Has another prefill worker named, for all choices that are there."""
        if attempt.num_repairs >= self._limits.max_repairs:
            failed = need.failed_worker_id or attempt.prefill_worker
            raise WorkerFailed(
                f"{Leg.PREFILL.value} {failed}: {need.reason}; {attempt.num_repairs} others had been tried before",
                leg=Leg.PREFILL,
                worker_id=failed,
            )
        self._prompt.repair(attempt, stream)

    def _chunk(self, attempt: Attempt, output: Output) -> SequenceChunk:
        prompt = self._prompt
        prompt_logprobs = None
        if output.tokens:
            prompt.ledger.first_token(attempt.wire_id)
            if self._request.params.prompt_logprobs is not None:
                prompt_logprobs = self._take_prompt_logprobs(attempt)
        if self._num_cached_tokens is None and output.num_cached_tokens is not None:
            self._num_cached_tokens = output.num_cached_tokens
            prompt.found_cached(attempt, output.num_cached_tokens)
        self._delivered.extend(token.token_id for token in output.tokens)
        return SequenceChunk(
            tokens=output.tokens,
            finish_reason=output.finish_reason,
            matched_token_id=output.matched_token_id,
            num_cached_tokens=self._num_cached_tokens or 0,
            prefill_worker=attempt.prefill_worker,
            decode_worker=attempt.plan.decode.worker_id,
            stages=output.stages,
            prompt_logprobs=prompt_logprobs,
        )

    def _take_prompt_logprobs(self, attempt: Attempt) -> tuple[SampledToken, ...]:
        """They come once: whoever goes on with the sequence is not asked for them again."""
        logprobs = attempt.streams.prompt_logprobs
        if logprobs is None:
            worker_id = attempt.plan.decode.worker_id
            raise WorkerFailed(
                f"{Leg.DECODE.value} {worker_id}: a first token came without the prompt's log-probabilities",
                leg=Leg.DECODE,
                worker_id=worker_id,
            )
        self._request = replace(self._request, params=replace(self._request.params, prompt_logprobs=None))
        return logprobs

    # --- its ends

    def _expire(self) -> None:
        if self._at is not None:
            attempt, stream = self._at
            attempt.session.abort(stream, self._prompt.too_late())

    def _leave(self, error: GenerationError) -> None:
        """Ends it at its worker, if it has not ended there. Idempotent."""
        if self._at is not None:
            (attempt, stream), self._at = self._at, None
            self._num_left = attempt.number
            self._prompt.leave(attempt, stream, error)

    def _end(self) -> None:
        error = Cancelled("its client left")
        self._leave(error)
        self._prompt.end(self._request, self._num_left, error)


def _given_up(attempt: Attempt) -> WorkerFailed:
    """The worker ended it by itself; what had come of the text is told, but nothing may pass for its end."""
    worker_id = attempt.plan.decode.worker_id
    return WorkerFailed(
        f"{Leg.DECODE.value} {worker_id}: the text could not be held to its structure any further, and is incomplete",
        leg=Leg.DECODE,
        worker_id=worker_id,
    )


def _told_why(error: WorkerLost | QueueFull, reason: str) -> WorkerLost | QueueFull:
    """The error that ends a request which cannot be moved: it names what was lost, and why that is the end."""
    if isinstance(error, QueueFull):
        return error  # says it all: everybody is busy
    return WorkerLost(f"{error.message}; {reason}", leg=error.leg, worker_id=error.worker_id)

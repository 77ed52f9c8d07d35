"""One request on its way through the cluster, repaired where it breaks.

    submit ──> stream of outputs ──> last output
      ^              │
      │              ├── NeedPrefill: the prefill worker was lost ──> assign another, or none: prefill locally
      └── resume ────┴── WorkerLost, QueueFull: the decode worker was ──> submit the rest elsewhere

What has been delivered is never sent again: the resumed request carries it, and goes on behind it, identically, because
a token is a function of the request alone. Both repairs are bounded. The run ends once: by its last output, by an
error, or by its reader leaving; in each case the worker forgets the request and its account is settled.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from cluster import wire
from cluster.clock import Clock
from cluster.errors import (
    Cancelled,
    DeadlineExceeded,
    GenerationError,
    Leg,
    NoWorker,
    QueueFull,
    WorkerFailed,
    WorkerLost,
)
from cluster.generator import GeneratorStats, SequenceChunk, SequenceRequest
from cluster.membership import Membership
from cluster.plan import Plan
from cluster.request_stream import RequestStream
from cluster.session import Session
from cluster.session_messages import NeedPrefill, Output
from engine.kvcache.block_hash import BlockHash, extend_hashes, root_hash


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


@dataclass(slots=True)
class _Attempt:
    """The request at one decode worker."""

    wire_id: str
    plan: Plan
    session: Session
    stream: RequestStream
    prefill_worker: str  # id of who prefills, by the last word on it
    repaired: bool = False


class RequestRun:
    """One request's life.

    Args:
        wire_id: names the request on the wire, with the number of the attempt behind it: a worker must never take
            the remains of one for another.
    """

    def __init__(
        self,
        request: SequenceRequest,
        membership: Membership,
        limits: RunLimits,
        stats: GeneratorStats,
        clock: Clock,
        wire_id: str,
    ) -> None:
        self._request = request
        self._membership = membership
        self._router = membership.router
        self._ledger = membership.ledger
        self._limits = limits
        self._stats = stats
        self._clock = clock
        self._wire_id = wire_id
        self._timeout_s = limits.timeout_s if request.timeout_s is None else request.timeout_s
        self._deadline = clock.time() + self._timeout_s

        model = membership.model
        self._block_size = model.block_size
        self._root = root_hash(model.fingerprint, request.cache_salt)
        self._hashes: list[BlockHash] = []  # of all full blocks of prompt and delivered tokens
        self._delivered: list[int] = []
        self._num_cached_tokens: int | None = None

        self._attempt: _Attempt | None = None
        self._num_attempts = 0
        self._num_repairs = 0
        self._tried: set[str] = set()  # instance ids of workers that failed this request

    async def chunks(self) -> AsyncGenerator[SequenceChunk, None]:
        """The sequence, to its end.

        Raises:
            GenerationError: it could not be finished.
        """
        timer = self._clock.call_at(self._deadline, self._expire)
        try:
            attempt = self._submit()
            while True:
                try:
                    message = await attempt.stream.next()
                except (WorkerLost, QueueFull) as error:
                    attempt = self._resubmit(attempt, error)
                    continue
                if isinstance(message, NeedPrefill):
                    self._repair(attempt, message)
                    continue
                yield self._chunk(attempt, message)
                if message.finish_reason is not None:
                    return
        finally:
            timer.cancel()
            self._leave(Cancelled("its client left"))

    # --- its steps

    def _submit(self) -> _Attempt:
        if self._membership.is_closed:
            raise _shutting_down()
        token_ids = [*self._request.prompt_token_ids, *self._delivered]
        extend_hashes(self._hashes, self._root, token_ids, self._block_size)
        while True:
            now = self._clock.time()
            if now >= self._deadline:
                raise self._too_late()
            plan = self._router.choose(self._hashes, len(token_ids), now, exclude=self._tried)
            session = self._membership.session(plan.decode.instance_id)
            if session is not None and session.is_open:
                break
            self._tried.add(plan.decode.instance_id)
        self._num_attempts += 1
        wire_id = f"{self._wire_id}.{self._num_attempts}"
        message = wire.submit(wire_id, self._request, plan, self._delivered, self._deadline - now)
        stream = session.submit(wire_id, message)
        self._ledger.assign(wire_id, plan, now)
        self._attempt = _Attempt(wire_id, plan, session, stream, plan.prefills.worker_id)
        self._stats.planned_cached_tokens += plan.num_cached_blocks * self._block_size
        self._stats.local_fallbacks += plan.is_fallback
        return self._attempt

    def _resubmit(self, attempt: _Attempt, error: WorkerLost | QueueFull) -> _Attempt:
        """Moves the request to another decode worker."""
        self._leave(error)
        if self._membership.is_closed:
            raise _shutting_down() from error  # the worker was not lost: we have let go of it
        self._tried.add(attempt.plan.decode.instance_id)
        if self._num_attempts > self._limits.max_resubmissions:
            raise _told_why(error, f"the request had been moved {self._limits.max_resubmissions} times before")
        try:
            moved = self._submit()
        except NoWorker as nobody:
            raise _told_why(error, nobody.message) from error
        self._stats.resubmissions += 1
        return moved

    def _repair(self, attempt: _Attempt, need: NeedPrefill) -> None:
        """Names another prefill worker, or lets the decode worker prefill."""
        now = self._clock.time()
        lost = attempt.plan.prefill
        if lost is not None:
            self._tried.add(lost.instance_id)
        if self._num_repairs >= self._limits.max_repairs:
            failed = need.failed_worker_id or attempt.prefill_worker
            raise WorkerFailed(
                f"{Leg.PREFILL.value} {failed}: {need.reason}; {self._num_repairs} others had been tried before",
                leg=Leg.PREFILL,
                worker_id=failed,
            )
        self._num_repairs += 1
        num_tokens = len(self._request.prompt_token_ids) + len(self._delivered)
        decode = attempt.plan.decode
        prefill = self._router.choose_prefill(decode, self._hashes, num_tokens, now, exclude=self._tried)
        self._ledger.reassign_prefill(attempt.wire_id, prefill, now)
        attempt.session.assign(attempt.stream, prefill)
        attempt.plan = replace(attempt.plan, prefill=prefill)
        attempt.prefill_worker = attempt.plan.prefills.worker_id
        attempt.repaired = True
        self._stats.repairs += 1
        self._stats.local_fallbacks += prefill is None

    def _chunk(self, attempt: _Attempt, output: Output) -> SequenceChunk:
        if output.tokens:
            self._ledger.first_token(attempt.wire_id)
        if self._num_cached_tokens is None and output.num_cached_tokens is not None:
            self._num_cached_tokens = output.num_cached_tokens
            hoped = attempt.plan.num_cached_blocks * self._block_size
            self._stats.stale_hits += not attempt.repaired and self._num_cached_tokens < hoped
        self._delivered.extend(token.token_id for token in output.tokens)
        return SequenceChunk(
            tokens=output.tokens,
            finish_reason=output.finish_reason,
            matched_token_id=output.matched_token_id,
            num_cached_tokens=self._num_cached_tokens or 0,
            prefill_worker=attempt.prefill_worker,
            decode_worker=attempt.plan.decode.worker_id,
            stages=output.stages,
        )

    # --- its ends

    def _expire(self) -> None:
        if self._attempt is not None:
            self._attempt.session.abort(self._attempt.stream, self._too_late())

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request did not end within {self._timeout_s:g} s")

    def _leave(self, error: GenerationError) -> None:
        """Ends the attempt at its worker, if it has not ended there. Idempotent."""
        if self._attempt is not None:
            self._attempt.session.abort(self._attempt.stream, error)
            self._ledger.release(self._attempt.wire_id)
            self._attempt = None


def _shutting_down() -> NoWorker:
    return NoWorker("the server is shutting down")


def _told_why(error: WorkerLost | QueueFull, reason: str) -> WorkerLost | QueueFull:
    """The error that ends a request which cannot be moved: it names what was lost, and why that is the end."""
    if isinstance(error, QueueFull):
        return error  # says it all: everybody is busy
    return WorkerLost(f"{error.message}; {reason}", leg=error.leg, worker_id=error.worker_id)

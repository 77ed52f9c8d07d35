"""A request in a decode worker, from the loop's point of view, and the books of all of them."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from engine.outputs import ReceiveTarget
from engine.request import Request
from engine.sampling_params import SamplingParams
from kvtransfer.sampling_wire import sampling_params_from_wire
from tandem.v1 import worker_pb2 as pb
from worker.drain import Drain
from worker.session import Session


class Stage(Enum):
    """Where its KV is."""

    ENGINE = "engine"  # waiting or running there; nothing is being copied
    PULLING = "pulling"  # a hand-off into its blocks is open
    NEEDS_PREFILL = "needs_prefill"  # the gateway was asked for another prefill worker


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One request that has not ended. Times are seconds of the worker's clock."""

    engine_id: str  # unique in this worker: two gateways may use the same request_id
    request_id: str
    session: Session
    prompt_token_ids: tuple[int, ...]
    resume_token_ids: tuple[int, ...]  # generated elsewhere, delivered already
    params: SamplingParams
    cache_salt: str
    priority: int
    plan: pb.Plan
    submitted_at: float
    deadline: float
    has_own_deadline: bool  # else it is this worker's default

    stage: Stage = Stage.ENGINE
    prefill_worker: pb.Peer | None = None  # of the hand-off that is open, or was last
    target: ReceiveTarget | None = None
    num_confirmed_blocks: int = 0
    num_repairs: int = 0
    first_token_id: int | None = None  # by a prefill worker, delivered, not known to the engine yet
    num_pulled_tokens: int = 0  # prompt tokens that came from a third worker's cache

    admitted_at: float | None = None
    first_token_at: float | None = None
    prefill_s: float = 0.0
    transfer_s: float = 0.0

    @classmethod
    def from_submit(
        cls,
        submit: pb.Submit,
        session: Session,
        engine_id: str,
        *,
        vocab_size: int,
        now: float,
        default_timeout_s: float,
    ) -> "ActiveRequest":
        """
        Raises:
            ValueError: parameters that are not allowed, a token outside the vocabulary.
        """
        prompt, resume = tuple(submit.prompt_token_ids), tuple(submit.resume_token_ids)
        if (largest := max((*prompt, *resume), default=0)) >= vocab_size:
            raise ValueError(f"token id {largest} is out of range: the vocabulary has {vocab_size}")
        return cls(
            engine_id=engine_id,
            request_id=submit.request_id,
            session=session,
            prompt_token_ids=prompt,
            resume_token_ids=resume,
            params=sampling_params_from_wire(submit.sampling_params),
            cache_salt=submit.cache_salt,
            priority=submit.priority,
            plan=submit.plan,
            submitted_at=now,
            deadline=now + (submit.timeout_ms / 1000 or default_timeout_s),
            has_own_deadline=submit.timeout_ms > 0,
            prefill_worker=submit.plan.prefill_worker if submit.plan.HasField("prefill_worker") else None,
        )

    def for_engine(self) -> Request:
        """
        Raises:
            ValueError: an empty prompt, nothing left to generate.
        """
        plan = self.plan
        return Request(
            self.engine_id,
            self.prompt_token_ids,
            self.params,
            arrival_time=self.submitted_at,
            cache_salt=self.cache_salt,
            priority=self.priority,
            resume_token_ids=self.resume_token_ids,
            receives_kv=self.prefill_worker is not None or (plan.HasField("cached_on") and plan.num_cached_blocks > 0),
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens whose KV is needed before the next one is sampled."""
        return self.prompt_token_ids + self.resume_token_ids

    def usage(self, num_cached: int, num_local: int) -> pb.Usage:
        """Cached tokens, of the prompt: a resumed request's own earlier tokens are no part of it."""
        limit = len(self.prompt_token_ids)
        return pb.Usage(num_cached_tokens=min(num_cached, limit), num_local_cached_tokens=min(num_local, limit))

    def stages(self, now: float) -> pb.StageTimes:
        """Where its time went."""
        admitted_at = self.admitted_at if self.admitted_at is not None else now
        first_token_at = self.first_token_at if self.first_token_at is not None else now
        return pb.StageTimes(
            queued=admitted_at - self.submitted_at,
            prefill=self.prefill_s or first_token_at - admitted_at,
            transfer=self.transfer_s,
            decode=now - first_token_at,
        )


class ActiveRequests:
    """Every request of a decode worker until it ends, found by its engine id and by its session.

    Args:
        out_of_time: called with a request whose deadline has passed; it is still in the books.
    """

    def __init__(self, drain: Drain, out_of_time: Callable[[ActiveRequest], None]) -> None:
        self._drain = drain
        self._out_of_time = out_of_time
        self._by_engine_id: dict[str, ActiveRequest] = {}
        self._by_session: dict[Session, dict[str, ActiveRequest]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(list(self._by_engine_id.values()))

    def __contains__(self, active: ActiveRequest) -> bool:
        return active.engine_id in self._by_engine_id

    def get(self, engine_id: str) -> ActiveRequest | None:
        return self._by_engine_id.get(engine_id)

    def find(self, session: Session, request_id: str) -> ActiveRequest | None:
        return self._by_session.get(session, {}).get(request_id)

    def of(self, session: Session) -> list[ActiveRequest]:
        return list(self._by_session.get(session, {}).values())

    def add(self, active: ActiveRequest) -> None:
        """From here on it counts as in flight, and its time runs."""
        self._by_engine_id[active.engine_id] = active
        self._by_session.setdefault(active.session, {})[active.request_id] = active
        timeout_s = active.deadline - active.submitted_at
        loop = asyncio.get_running_loop()
        self._timers[active.engine_id] = loop.call_later(timeout_s, self._out_of_time, active)
        self._drain.enter()

    def remove(self, active: ActiveRequest) -> bool:
        """Takes a request out of the books; whether it was there."""
        if self._by_engine_id.pop(active.engine_id, None) is None:
            return False
        requests = self._by_session[active.session]
        del requests[active.request_id]
        if not requests:
            del self._by_session[active.session]
        self._timers.pop(active.engine_id).cancel()
        self._drain.leave()
        return True

"""A request in a decode worker, from the loop's point of view.

An `ActiveRequest` is a prompt's way: its plan, its hand-off, its repairs, its blocks. It has a `Choice` for each
sequence that continues the prompt, and ends with the last of them.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

from engine.outputs import ReceiveTarget
from engine.request import Request
from engine.sampling_params import SamplingParams
from kvtransfer.messages import PrefillSource
from kvtransfer.sampling_wire import sampling_params_from_wire
from tandem.v1 import worker_pb2 as pb
from worker.session import Session


class Stage(Enum):
    """Where a prompt's KV is."""

    ENGINE = "engine"  # waiting or running there; nothing is being copied
    PULLING = "pulling"  # a hand-off into its blocks is open
    NEEDS_PREFILL = "needs_prefill"  # the gateway was asked for another prefill worker


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence that has not ended."""

    request: "ActiveRequest"
    request_id: str  # the gateway's
    engine_id: str  # unique in this worker: two gateways may use the same request_id
    params: SamplingParams
    first_token_id: int | None = None  # by a prefill worker, delivered, not known to the engine yet
    first_token_at: float | None = None


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One prompt of which a choice has not ended. Times are seconds of the worker's clock."""

    engine_id: str  # of the engine's request that receives or computes the prompt; that of its choice if it has one
    request_id: str
    session: Session
    prompt_token_ids: tuple[int, ...]
    resume_token_ids: tuple[int, ...]  # generated elsewhere, delivered already
    params: SamplingParams  # of all its choices, but for the seed
    cache_salt: str
    priority: int
    plan: pb.Plan
    submitted_at: float
    deadline: float
    has_own_deadline: bool  # else it is this worker's default
    has_forks: bool  # its choices are forks of the engine's request, not that request itself

    choices: list[Choice] = field(default_factory=list)  # that have not ended
    stage: Stage = Stage.ENGINE
    prefill_worker: pb.Peer | None = None  # of the hand-off that is open, or was last
    prefilled: tuple[Choice, ...] = ()  # whose first tokens that hand-off brings, in this order
    need: pb.NeedPrefill | None = None  # what the gateway was asked last
    target: ReceiveTarget | None = None
    num_confirmed_blocks: int = 0
    num_repairs: int = 0
    num_pulled_tokens: int = 0  # prompt tokens that came from a third worker's cache
    has_told_prompt_logprobs: bool = False

    admitted_at: float | None = None
    prefill_s: float = 0.0
    transfer_s: float = 0.0

    @classmethod
    def from_submit(
        cls,
        submit: pb.Submit,
        session: Session,
        suffix: str,
        *,
        vocab_size: int,
        now: float,
        default_timeout_s: float,
    ) -> "ActiveRequest":
        """
        Args:
            suffix: of its names in the engine.

        Raises:
            ValueError: parameters that are not allowed, a token outside the vocabulary, choices that make no sense.
        """
        prompt, resume = tuple(submit.prompt_token_ids), tuple(submit.resume_token_ids)
        if (largest := max((*prompt, *resume), default=0)) >= vocab_size:
            raise ValueError(f"token id {largest} is out of range: the vocabulary has {vocab_size}")
        _check_choices(submit)
        params = sampling_params_from_wire(submit.sampling_params)
        active = cls(
            engine_id=submit.request_id + suffix,
            request_id=submit.request_id,
            session=session,
            prompt_token_ids=prompt,
            resume_token_ids=resume,
            params=params,
            cache_salt=submit.cache_salt,
            priority=submit.priority,
            plan=submit.plan,
            submitted_at=now,
            deadline=now + (submit.timeout_ms / 1000 or default_timeout_s),
            has_own_deadline=submit.timeout_ms > 0,
            has_forks=bool(submit.choices),
            prefill_worker=submit.plan.prefill_worker if submit.plan.HasField("prefill_worker") else None,
        )
        active.choices = [
            Choice(active, wire.request_id, wire.request_id + suffix, replace(params, seed=wire.seed))
            for wire in submit.choices
        ] or [Choice(active, active.request_id, active.engine_id, params)]
        return active

    def for_engine(self) -> tuple[Request, list[Request]]:
        """The engine's request, and its forks.

        Raises:
            ValueError: an empty prompt, nothing left to generate.
        """
        receives_kv = self.prefill_worker is not None or self.num_blocks_elsewhere > 0
        forks = [self._request(choice.engine_id, choice.params) for choice in self.choices] if self.has_forks else []
        return self._request(self.engine_id, self.params, receives_kv=receives_kv), forks

    def _request(self, engine_id: str, params: SamplingParams, *, receives_kv: bool = False) -> Request:
        return Request(
            engine_id,
            self.prompt_token_ids,
            params,
            arrival_time=self.submitted_at,
            cache_salt=self.cache_salt,
            priority=self.priority,
            resume_token_ids=self.resume_token_ids,
            receives_kv=receives_kv,
        )

    @property
    def num_blocks_elsewhere(self) -> int:
        """Leading blocks to be had from a third worker's cache. None help where the prompt's log-probabilities are
        wanted: they come of computing it."""
        usable = self.plan.HasField("cached_on") and self.params.prompt_logprobs is None
        return self.plan.num_cached_blocks if usable else 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens whose KV is needed before the next one is sampled."""
        return self.prompt_token_ids + self.resume_token_ids

    @property
    def first_tokens(self) -> dict[str, int]:
        """By choice's engine id, if a prefill worker has sampled them: then of all its choices."""
        return {c.engine_id: c.first_token_id for c in self.choices if c.first_token_id is not None}

    def named(self, request_id: str) -> list[Choice]:
        """The choices that a gateway means by `request_id`: one, or all of a prompt."""
        return [c for c in self.choices if request_id in (c.request_id, self.request_id)]

    def prefill_source(self) -> PrefillSource:
        """What a prefill worker is asked for: KV, and what has not been delivered yet."""
        params = self.params
        if self.first_tokens:
            params = replace(params, prompt_logprobs=None)
            self.prefilled = ()
        else:
            self.prefilled = tuple(self.choices)
        num_cached = self.num_blocks_elsewhere
        seeds = tuple(choice.params.seed for choice in self.prefilled)
        return PrefillSource(
            token_ids=self.token_ids,
            num_prompt_tokens=len(self.prompt_token_ids),
            params=replace(params, seed=seeds[0]) if self.has_forks and seeds else params,
            skip_blocks=self.num_confirmed_blocks,
            cache_salt=self.cache_salt,
            priority=self.priority,
            cached_on_address=self.plan.cached_on.address if num_cached else None,
            num_cached_blocks=num_cached,
            seeds=seeds if len(seeds) > 1 else (),
        )

    def usage(self, num_cached: int, num_local: int) -> pb.Usage:
        """Cached tokens, of the prompt: a resumed request's own earlier tokens are no part of it."""
        limit = len(self.prompt_token_ids)
        return pb.Usage(num_cached_tokens=min(num_cached, limit), num_local_cached_tokens=min(num_local, limit))

    def stages(self, choice: Choice, now: float) -> pb.StageTimes:
        """Where a choice's time went."""
        admitted_at = self.admitted_at if self.admitted_at is not None else now
        first_token_at = choice.first_token_at if choice.first_token_at is not None else now
        return pb.StageTimes(
            queued=admitted_at - self.submitted_at,
            prefill=self.prefill_s or first_token_at - admitted_at,
            transfer=self.transfer_s,
            decode=now - first_token_at,
        )


def _check_choices(submit: pb.Submit) -> None:
    if not submit.choices:
        return
    if len(submit.choices) < 2:
        raise ValueError("a prompt of one choice names none: its request_id and seed are the choice's")
    if submit.resume_token_ids:
        raise ValueError(f"{len(submit.choices)} choices cannot resume: each goes on by itself, from its own tokens")
    names = {submit.request_id, *(choice.request_id for choice in submit.choices)}
    if len(names) <= len(submit.choices):
        raise ValueError(f"the {len(submit.choices)} choices and their prompt must have a name each, not {len(names)}")

"""All requests of a decode worker: from a session's `Submit` to the last token.

Everything here happens on the loop, and everything may happen in any order, and twice: a request that is not in the
books any more is left alone. What the engine is told goes to its thread in order, so it never hears of a request after
its abort. The engine frees a prompt's blocks at its abort; so while a hand-off is open that waits for the hand-off's
own end, when no copy is in flight. How KV comes to a request is the `Receiver`'s business.
"""

from collections.abc import Sequence
from functools import partial

from decode_worker.active_requests import ActiveRequests
from decode_worker.outbox import Outbox
from decode_worker.receiver import Receiver
from decode_worker.request import ActiveRequest, Choice
from engine.outputs import RequestOutput, StepResult
from kvtransfer.errors import Code
from kvtransfer.sampling_wire import prompt_logprobs_to_wire
from tandem.v1 import worker_pb2 as pb
from worker.context import WorkerContext
from worker.lender import CacheLender
from worker.session import Session


class DecodeRole(CacheLender):
    """A decode worker's `Role`: consumer of prefills, holder of what it caches. Its requests' `RequestEnds`."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._context = context
        self._config = context.config
        self._clock = context.clock
        self._outbox = Outbox()
        self._active = ActiveRequests(context.drain, self.out_of_time)
        self._num_submitted = 0
        self._receiver = Receiver(context, self._engine, self._active, self._outbox, self)
        self.puller = self._receiver.puller

    @property
    def num_transferring(self) -> int:
        return self.puller.num_active

    # --- SessionHandler

    def submit(self, session: Session, submit: pb.Submit) -> None:
        if self._context.drain.draining:
            session.refuse(submit.request_id, Code.FAILED_PRECONDITION, "the worker is draining")
            return
        for request_id in (submit.request_id, *(choice.request_id for choice in submit.choices)):
            if self._active.find(session, request_id) is not None:
                session.refuse(submit.request_id, Code.ALREADY_EXISTS, f"request {request_id} is in flight already")
                return
        self._num_submitted += 1
        try:
            active = ActiveRequest.from_submit(
                submit,
                session,
                suffix=f"#{self._num_submitted}",
                vocab_size=self._context.built.vocab_size,
                now=self._clock(),
                default_timeout_s=self._config.request_timeout_s,
            )
            request, forks = active.for_engine()
        except ValueError as exc:
            session.refuse(submit.request_id, Code.INVALID_ARGUMENT, str(exc))
            return
        self._active.add(active)
        self._engine.add_request(request, partial(self._refused_by_engine, active), forks)

    def assign(self, session: Session, assign: pb.Assign) -> None:
        if (active := self._active.find(session, assign.request_id)) is not None:
            self._receiver.assigned(active, assign)

    def abort_requests(self, session: Session, request_ids: list[str]) -> None:
        choices: list[Choice] = []
        for request_id in request_ids:
            if (active := self._active.find(session, request_id)) is not None:
                choices += active.named(request_id)
        self.drop(choices)

    def session_ended(self, session: Session) -> None:
        self.drop([choice for active in self._active.of(session) for choice in active.choices])

    # --- RequestEnds

    def drop(self, choices: Sequence[Choice]) -> None:
        """Ends sequences that the engine still has, without a word to their gateway."""
        dropped = [choice for choice in choices if self._active.remove(choice)]
        for choice in dropped:
            if choice.request.has_forks:
                self._engine.abort(choice.engine_id)  # no copy goes into a fork's blocks
        for active in dict.fromkeys(choice.request for choice in dropped):
            self._receiver.choices_dropped(active)

    def refuse(self, active: ActiveRequest, code: Code, message: str) -> None:
        if active in self._active:
            active.session.refuse(active.request_id, code, message)
            self.drop(list(active.choices))

    def _refused_by_engine(self, active: ActiveRequest, code: Code, message: str) -> None:
        if active in self._active:
            active.session.refuse(active.request_id, code, message)
            for choice in list(active.choices):
                self._active.remove(choice)

    def out_of_time(self, active: ActiveRequest) -> None:
        self.refuse(active, Code.DEADLINE_EXCEEDED, "the request's deadline has passed")

    def on_failure(self, error: BaseException) -> None:
        message = f"decode worker {self._config.worker_id}: the engine failed: {type(error).__name__}: {error}"
        for active in self._active:
            # Another worker may well do it: to the gateway this worker is lost.
            self.refuse(active, Code.UNAVAILABLE, message)

    # --- what the engine says

    def on_step(self, result: StepResult) -> None:
        now = self._clock()
        for request_id in result.admitted:
            if (active := self._active.get(request_id)) is not None:
                active.admitted_at = result.started_at
        for target in result.received_targets:
            if (active := self._active.get(target.request_id)) is not None:
                self._receiver.receive(active, target)
        for output in result.outputs:
            if (choice := self._active.choice(output.request_id)) is not None:
                self._decoded(choice, output, now)
        self._outbox.flush()

    def _decoded(self, choice: Choice, output: RequestOutput, now: float) -> None:
        active = choice.request
        usage = stages = prompt_logprobs = None
        if choice.first_token_at is None:
            choice.first_token_at = now
            cached = max(output.num_cached_tokens, active.num_pulled_tokens)
            usage = active.usage(cached, output.num_cached_tokens)
            if output.prompt_logprobs is not None and not active.has_told_prompt_logprobs:
                active.has_told_prompt_logprobs = True
                prompt_logprobs = prompt_logprobs_to_wire(output.prompt_logprobs, active.params.prompt_logprobs or 0)
        if output.finish_reason is not None:
            stages = active.stages(choice, now)
            self._active.remove(choice)
        self._outbox.add(
            active.session,
            choice.request_id,
            output.token,
            output.finish_reason,
            usage=usage,
            stages=stages,
            matched_token_id=output.matched_token_id,
            prompt_logprobs=prompt_logprobs,
        )

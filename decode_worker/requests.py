"""All requests of a decode worker: from a session's `Submit` to the last token.

Everything here happens on the loop, and everything may happen in any order, and twice: a request that is not in the
books any more is left alone. What the engine is told goes to its thread in order, so it never hears of a request
after its abort. The engine frees blocks at an abort; so while a hand-off is open the abort waits for the hand-off's
own end (`ended`), when no copy is in flight.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from uuid import uuid4

from decode_worker.active_requests import ActiveRequests
from decode_worker.outbox import Outbox
from decode_worker.request import ActiveRequest, Choice, Stage
from engine.executor import SampledToken
from engine.outputs import ReceiveTarget, RequestOutput, StepResult
from engine.sampling_params import FinishReason, finish_reason_after
from kvtransfer.client import GrpcTransport
from kvtransfer.errors import Code
from kvtransfer.events import HandoffResult, HolderLost
from kvtransfer.messages import CachedSource, Complete, Open, PrefillSource
from kvtransfer.puller import Puller
from kvtransfer.sampling_wire import prompt_logprobs_to_wire
from tandem.v1 import worker_pb2 as pb
from worker.context import WorkerContext
from worker.lender import CacheLender, cached_source
from worker.session import Session

# A holder that ends a hand-off so says that the request itself is wrong: no other holder would take it.
_REQUEST_AT_FAULT = (Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE)


class DecodeRole(CacheLender):
    """A decode worker's `Role`: consumer of prefills, holder of what it caches."""

    def __init__(self, context: WorkerContext, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(context)
        self._context = context
        self._config = context.config
        self._clock = clock
        self._outbox = Outbox()
        self._active = ActiveRequests(context.drain, self._out_of_time)
        self._num_submitted = 0
        transport = GrpcTransport(tls=context.tls)
        self.puller = Puller(context.built.memory, context.layout, self, transport, times=context.times)

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
        active = self._active.find(session, assign.request_id)
        if active is None or active.stage is not Stage.NEEDS_PREFILL:
            return
        if assign.HasField("prefill_worker"):
            self._open_prefill(active, assign.prefill_worker)
        else:
            self._prefill_here(active)

    def abort_requests(self, session: Session, request_ids: list[str]) -> None:
        choices: list[Choice] = []
        for request_id in request_ids:
            if (active := self._active.find(session, request_id)) is not None:
                choices += active.named(request_id)
        self._drop(choices)

    def session_ended(self, session: Session) -> None:
        self._drop([choice for active in self._active.of(session) for choice in active.choices])

    # --- ends

    def _drop(self, choices: Sequence[Choice]) -> None:
        """Ends sequences that the engine still has, without a word to their gateway."""
        dropped = [choice for choice in choices if self._active.remove(choice)]
        for choice in dropped:
            if choice.request.has_forks:
                self._engine.abort(choice.engine_id)  # no copy goes into a fork's blocks
        for active in dict.fromkeys(choice.request for choice in dropped):
            if not active.choices:
                if not self.puller.abort(active.engine_id):  # else `ended` follows
                    self.ended(active.engine_id)
            elif active.stage is Stage.NEEDS_PREFILL and not self._was_asked(active):
                self._ask_for_prefill(active)

    def _refuse(self, active: ActiveRequest, code: Code, message: str) -> None:
        if active in self._active:
            active.session.refuse(active.request_id, code, message)
            self._drop(list(active.choices))

    def _refused_by_engine(self, active: ActiveRequest, code: Code, message: str) -> None:
        if active in self._active:
            active.session.refuse(active.request_id, code, message)
            for choice in list(active.choices):
                self._active.remove(choice)

    def _out_of_time(self, active: ActiveRequest) -> None:
        self._refuse(active, Code.DEADLINE_EXCEEDED, "the request's deadline has passed")

    def on_failure(self, error: BaseException) -> None:
        message = f"decode worker {self._config.worker_id}: the engine failed: {type(error).__name__}: {error}"
        for active in self._active:
            # Another worker may well do it: to the gateway this worker is lost.
            self._refuse(active, Code.UNAVAILABLE, message)

    # --- what the engine says

    def on_step(self, result: StepResult) -> None:
        now = self._clock()
        for request_id in result.admitted:
            if (active := self._active.get(request_id)) is not None:
                active.admitted_at = now
        for target in result.received_targets:
            if (active := self._active.get(target.request_id)) is not None:
                self._receive(active, target)
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

    # --- receiving

    def _receive(self, active: ActiveRequest, target: ReceiveTarget) -> None:
        """Its blocks are reserved: what is to come into them?"""
        active.target = target
        active.num_confirmed_blocks = target.num_cached_blocks
        if active.prefill_worker is not None:
            self._open_prefill(active, active.prefill_worker)
            return
        source = cached_source(
            self._context,
            active.token_ids,
            active.cache_salt,
            active.plan.num_cached_blocks,
            skip_blocks=target.num_cached_blocks,
        )
        if len(source.block_hashes) > target.num_cached_blocks:
            self._open(active, active.plan.cached_on.address, source)
        else:
            self._prefill_here(active)

    def _open_prefill(self, active: ActiveRequest, peer: pb.Peer) -> None:
        active.prefill_worker = peer
        self._open(active, peer.address, active.prefill_source())

    def _open(self, active: ActiveRequest, address: str, source: PrefillSource | CachedSource) -> None:
        assert active.target is not None
        timeout_s = active.deadline - self._clock()
        if timeout_s <= 0:
            self._out_of_time(active)
            return
        active.stage = Stage.PULLING
        open = Open(
            handoff_id=uuid4().hex,
            request_id=active.engine_id,
            consumer_instance_id=self._context.instance_id,
            fingerprint=self._context.layout.fingerprint,
            timeout_s=timeout_s if active.has_own_deadline else min(timeout_s, self._config.handoff_timeout_s),
            source=source,
        )
        delivered = bool(active.first_tokens)
        self.puller.pull(address, open, active.target.block_tables, first_tokens_delivered=delivered)

    def _prefill_here(self, active: ActiveRequest) -> None:
        """What is confirmed is real, the rest is computed by the engine."""
        num_tokens = active.num_confirmed_blocks * self._context.layout.block_size
        self._run(active, min(num_tokens, len(active.token_ids)))

    def _run(self, active: ActiveRequest, num_tokens: int) -> None:
        active.stage = Stage.ENGINE
        first_tokens = active.first_tokens
        if not first_tokens:
            # At least the last token is computed, for its logits.
            num_tokens = min(num_tokens, len(active.token_ids) - 1)
        if active.has_forks:
            self._engine.finish_receiving(active.engine_id, num_tokens, None, first_tokens or None)
        else:
            self._engine.finish_receiving(active.engine_id, num_tokens, first_tokens.get(active.engine_id))

    # --- ConsumerPort

    def first_tokens(self, request_id: str, complete: Complete) -> None:
        """To the client at once, past the engine: they are right by themselves."""
        active = self._active.get(request_id)
        if active is None:
            return
        now = self._clock()
        active.prefill_s = complete.queued_s + complete.prefill_s
        assert active.target is not None
        local = active.target.num_cached_blocks * self._context.layout.block_size
        usage = active.usage(complete.num_cached_tokens, min(local, complete.num_cached_tokens))
        prompt_logprobs = complete.prompt_logprobs
        ended: list[Choice] = []
        for choice, token in zip(active.prefilled, complete.first_tokens, strict=True):
            if choice not in active.choices:
                continue  # aborted meanwhile
            finish_reason = self._take_first_token(choice, token, now)
            if finish_reason is not None:
                ended.append(choice)
            self._outbox.add(
                active.session,
                choice.request_id,
                token,
                finish_reason,
                usage=usage,
                stages=active.stages(choice, now) if finish_reason is not None else None,
                matched_token_id=token.token_id if finish_reason is FinishReason.STOP else None,
                prompt_logprobs=prompt_logprobs,
            )
            prompt_logprobs = None  # told once
        self._outbox.flush()
        active.has_told_prompt_logprobs = True
        self._drop(ended)  # nobody needs their KV

    def _take_first_token(self, choice: Choice, token: SampledToken, now: float) -> FinishReason | None:
        active = choice.request
        choice.first_token_id = token.token_id
        choice.first_token_at = now
        num_outputs = len(active.resume_token_ids) + 1
        return finish_reason_after(
            choice.params,
            token.token_id,
            num_outputs,
            len(active.prompt_token_ids) + num_outputs,
            self._config.engine.max_model_len,
        )

    def commit_blocks(self, request_id: str, num_blocks: int) -> None:
        if (active := self._active.get(request_id)) is not None:
            active.num_confirmed_blocks = num_blocks
        self._engine.commit_blocks(request_id, num_blocks)

    def committed(self, request_id: str, result: HandoffResult) -> None:
        self._context.metrics.observe_transfer(result.stats)
        active = self._active.get(request_id)
        if active is None:  # dropped while its last event was on the way
            self.ended(request_id)
            return
        active.num_confirmed_blocks = result.num_blocks
        if not result.complete.first_tokens:
            active.num_pulled_tokens = result.num_blocks * self._context.layout.block_size
            self._prefill_here(active)
            return
        if (first_token_at := active.choices[0].first_token_at) is not None:
            active.transfer_s = self._clock() - first_token_at
        self._run(active, len(active.token_ids))

    def holder_lost(self, request_id: str, lost: HolderLost) -> None:
        active = self._active.get(request_id)
        if active is None:
            self.ended(request_id)
            return
        active.num_confirmed_blocks = lost.num_confirmed_blocks
        if active.prefill_worker is None:
            # Only a cached prefix is lost: what came of it counts, the rest is computed.
            active.num_pulled_tokens = lost.num_confirmed_blocks * self._context.layout.block_size
            self._prefill_here(active)
            return
        if lost.is_unmappable:
            # The same worker again, at no cost of a repair: what it has computed it caches.
            self._open_prefill(active, active.prefill_worker)
            return
        leg = f"prefill worker {active.prefill_worker.worker_id}"
        if lost.code in _REQUEST_AT_FAULT:
            self._refuse(active, lost.code, f"{leg}: {lost.message}")
        elif active.num_repairs >= self._config.max_repairs:
            message = f"{leg}: {lost.message} (after {active.num_repairs} repairs)"
            self._refuse(active, Code.INTERNAL, message)
        else:
            active.num_repairs += 1
            active.stage = Stage.NEEDS_PREFILL
            active.need = pb.NeedPrefill(
                reason=lost.message,
                num_confirmed_blocks=lost.num_confirmed_blocks,
                failed_worker_id=active.prefill_worker.worker_id,
            )
            self._ask_for_prefill(active)

    def _ask_for_prefill(self, active: ActiveRequest) -> None:
        """In the name of the first choice that lives."""
        assert active.need is not None
        active.need.request_id = active.choices[0].request_id
        active.session.send(pb.SessionResponse(need_prefill=active.need))

    def _was_asked(self, active: ActiveRequest) -> bool:
        """Whether the choice still lives in whose name the gateway was asked."""
        return active.need is not None and bool(active.named(active.need.request_id))

    def ended(self, request_id: str) -> None:
        """No copy is in flight into the request's blocks: the engine may free them."""
        self._engine.abort(request_id)

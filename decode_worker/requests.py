"""All requests of a decode worker: from a session's `Submit` to the last token.

Everything here happens on the loop, and everything may happen in any order, and twice: a request that is not in the
books any more is left alone. What the engine is told goes to its thread in order, so it never hears of a request
after its abort. The engine frees blocks at an abort; so while a hand-off is open the abort waits for the hand-off's
own end (`ended`), when no copy is in flight.
"""

import time
from collections.abc import Callable
from functools import partial
from uuid import uuid4

from decode_worker.outbox import Outbox
from decode_worker.request import ActiveRequest, ActiveRequests, Stage
from engine.executor import SampledToken
from engine.outputs import ReceiveTarget, RequestOutput, StepResult
from engine.sampling_params import FinishReason, finish_reason_after
from kvtransfer.client import GrpcTransport
from kvtransfer.errors import Code
from kvtransfer.events import HandoffResult, HolderLost
from kvtransfer.messages import CachedSource, Complete, Open, PrefillSource
from kvtransfer.puller import Puller
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
        if self._active.find(session, submit.request_id) is not None:
            session.refuse(submit.request_id, Code.ALREADY_EXISTS, f"request {submit.request_id} is in flight already")
            return
        self._num_submitted += 1
        try:
            active = ActiveRequest.from_submit(
                submit,
                session,
                engine_id=f"{submit.request_id}#{self._num_submitted}",
                vocab_size=self._context.built.vocab_size,
                now=self._clock(),
                default_timeout_s=self._config.request_timeout_s,
            )
            request = active.for_engine()
        except ValueError as exc:
            session.refuse(submit.request_id, Code.INVALID_ARGUMENT, str(exc))
            return
        self._active.add(active)
        self._engine.add_request(request, partial(self._refused_by_engine, active))

    def assign(self, session: Session, assign: pb.Assign) -> None:
        active = self._active.find(session, assign.request_id)
        if active is None or active.stage is not Stage.NEEDS_PREFILL:
            return
        if assign.HasField("prefill_worker"):
            self._open_prefill(active, assign.prefill_worker)
        else:
            self._prefill_here(active)

    def abort_requests(self, session: Session, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if (active := self._active.find(session, request_id)) is not None:
                self._drop(active)

    def session_ended(self, session: Session) -> None:
        for active in self._active.of(session):
            self._drop(active)

    # --- ends

    def _drop(self, active: ActiveRequest) -> None:
        """Ends a request that the engine still has, without a word to its gateway."""
        if not self._active.remove(active):
            return
        if not self.puller.abort(active.engine_id):  # else `ended` follows
            self.ended(active.engine_id)

    def _refuse(self, active: ActiveRequest, code: Code, message: str) -> None:
        if active in self._active:
            active.session.refuse(active.request_id, code, message)
            self._drop(active)

    def _refused_by_engine(self, active: ActiveRequest, code: Code, message: str) -> None:
        if self._active.remove(active):
            active.session.refuse(active.request_id, code, message)

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
            if (active := self._active.get(output.request_id)) is not None:
                self._decoded(active, output, now)
        self._outbox.flush()

    def _decoded(self, active: ActiveRequest, output: RequestOutput, now: float) -> None:
        usage = None
        if active.first_token_at is None:
            active.first_token_at = now
            cached = max(output.num_cached_tokens, active.num_pulled_tokens)
            usage = active.usage(cached, output.num_cached_tokens)
        stages = None
        if output.finish_reason is not None:
            stages = active.stages(now)
            self._active.remove(active)
        self._outbox.add(
            active.session,
            active.request_id,
            output.token,
            output.finish_reason,
            usage=usage,
            stages=stages,
            matched_token_id=output.matched_token_id,
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
        source = PrefillSource(
            token_ids=active.token_ids,
            num_prompt_tokens=len(active.prompt_token_ids),
            params=active.params,
            skip_blocks=active.num_confirmed_blocks,
            cache_salt=active.cache_salt,
            priority=active.priority,
            cached_on_address=active.plan.cached_on.address or None,
            num_cached_blocks=active.plan.num_cached_blocks,
        )
        self._open(active, peer.address, source)

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
        delivered = active.first_token_id is not None
        self.puller.pull(address, open, active.target.block_tables, first_token_delivered=delivered)

    def _prefill_here(self, active: ActiveRequest) -> None:
        """What is confirmed is real, the rest is computed by the engine."""
        num_tokens = active.num_confirmed_blocks * self._context.layout.block_size
        self._run(active, min(num_tokens, len(active.token_ids)))

    def _run(self, active: ActiveRequest, num_tokens: int) -> None:
        active.stage = Stage.ENGINE
        if active.first_token_id is None:
            # At least the last token is computed, for its logits.
            num_tokens = min(num_tokens, len(active.token_ids) - 1)
        self._engine.finish_receiving(active.engine_id, num_tokens, active.first_token_id)

    # --- ConsumerPort

    def first_token(self, request_id: str, token: SampledToken, complete: Complete) -> None:
        """To the client at once, past the engine: it is right by itself."""
        active = self._active.get(request_id)
        if active is None:
            return
        now = self._clock()
        active.first_token_id = token.token_id
        active.first_token_at = now
        active.prefill_s = complete.queued_s + complete.prefill_s
        assert active.target is not None
        local = active.target.num_cached_blocks * self._context.layout.block_size
        num_outputs = len(active.resume_token_ids) + 1
        finish_reason = finish_reason_after(
            active.params,
            token.token_id,
            num_outputs,
            len(active.prompt_token_ids) + num_outputs,
            self._config.engine.max_model_len,
        )
        self._outbox.add(
            active.session,
            active.request_id,
            token,
            finish_reason,
            usage=active.usage(complete.num_cached_tokens, min(local, complete.num_cached_tokens)),
            stages=active.stages(now) if finish_reason is not None else None,
            matched_token_id=token.token_id if finish_reason is FinishReason.STOP else None,
        )
        self._outbox.flush()
        if finish_reason is not None:
            self._drop(active)  # nobody needs its KV

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
        if result.complete.first_token is None:
            active.num_pulled_tokens = result.num_blocks * self._context.layout.block_size
            self._prefill_here(active)
            return
        if active.first_token_at is not None:
            active.transfer_s = self._clock() - active.first_token_at
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
            need = pb.NeedPrefill(
                request_id=active.request_id,
                reason=lost.message,
                num_confirmed_blocks=lost.num_confirmed_blocks,
                failed_worker_id=active.prefill_worker.worker_id,
            )
            active.session.send(pb.SessionResponse(need_prefill=need))

    def ended(self, request_id: str) -> None:
        """No copy is in flight into the request's blocks: the engine may free them."""
        self._engine.abort(request_id)

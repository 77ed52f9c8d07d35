"""How the KV of prompts comes into a decode worker's blocks: hand-offs, their repairs, and what they bring at once.

A prompt's blocks are reserved by the engine (`receive`). Then a hand-off is opened: for its KV and first tokens, from a
prefill worker; or for a prefix that a third worker caches, and the engine computes the rest. A prefill worker that is
lost is replaced by whom the gateway names, a bounded number of times; what is confirmed by then stays.
"""

from collections.abc import Sequence
from typing import Protocol
from uuid import uuid4

from decode_worker.active_requests import ActiveRequests
from decode_worker.outbox import Outbox
from decode_worker.request import ActiveRequest, Choice, Stage
from engine.executor import SampledToken
from engine.outputs import ReceiveTarget
from engine.sampling_params import FinishReason, finish_reason_after
from kvtransfer.client import GrpcTransport
from kvtransfer.errors import Code
from kvtransfer.events import HandoffResult, HolderLost
from kvtransfer.messages import CachedSource, Complete, Open, PrefillSource
from kvtransfer.puller import Puller
from tandem.v1 import worker_pb2 as pb
from worker.context import WorkerContext
from worker.engine_commands import EngineCommands
from worker.lender import cached_source

# A holder that ends a hand-off so says that the request itself is wrong: no other holder would take it.
_REQUEST_AT_FAULT = (Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE)


class RequestEnds(Protocol):
    """How requests end before their last token."""

    def drop(self, choices: Sequence[Choice]) -> None:
        """Without a word to their gateway."""
        ...

    def refuse(self, active: ActiveRequest, code: Code, message: str) -> None: ...

    def out_of_time(self, active: ActiveRequest) -> None: ...


class Receiver:
    """Implements `kvtransfer.ports.ConsumerPort`. Lives on the loop."""

    def __init__(
        self,
        context: WorkerContext,
        engine: EngineCommands,
        active: ActiveRequests,
        outbox: Outbox,
        ends: RequestEnds,
    ) -> None:
        self._context = context
        self._config = context.config
        self._engine = engine
        self._active = active
        self._outbox = outbox
        self._ends = ends
        self._clock = context.clock
        transport = GrpcTransport(tls=context.tls)
        self.puller = Puller(context.built.memory, context.layout, self, transport, times=context.times)

    def receive(self, active: ActiveRequest, target: ReceiveTarget) -> None:
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
            self._ends.out_of_time(active)
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

    def assigned(self, active: ActiveRequest, assign: pb.Assign) -> None:
        """The gateway's answer to `NeedPrefill`."""
        if active.stage is not Stage.NEEDS_PREFILL:
            return
        if assign.HasField("prefill_worker"):
            self._open_prefill(active, assign.prefill_worker)
        else:
            self._prefill_here(active)

    def choices_dropped(self, active: ActiveRequest) -> None:
        """Some of its choices have gone: with the last one its KV, as soon as no copy is in flight into its blocks."""
        if not active.choices:
            if not self.puller.abort(active.engine_id):  # else `ended` follows
                self.ended(active.engine_id)
        elif active.stage is Stage.NEEDS_PREFILL:
            assert active.need is not None
            if not active.named(active.need.request_id):  # the choice has gone in whose name it was asked
                self._ask(active)

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
        self._ends.drop(ended)  # nobody needs their KV

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
            self._ends.refuse(active, lost.code, f"{leg}: {lost.message}")
        elif active.num_repairs >= self._config.max_repairs:
            message = f"{leg}: {lost.message} (after {active.num_repairs} repairs)"
            self._ends.refuse(active, Code.INTERNAL, message)
        else:
            active.num_repairs += 1
            active.stage = Stage.NEEDS_PREFILL
            active.need = pb.NeedPrefill(
                reason=lost.message,
                num_confirmed_blocks=lost.num_confirmed_blocks,
                failed_worker_id=active.prefill_worker.worker_id,
            )
            self._ask(active)

    def _ask(self, active: ActiveRequest) -> None:
        """In the name of the first choice that lives."""
        assert active.need is not None
        active.need.request_id = active.choices[0].request_id
        active.session.send(pb.SessionResponse(need_prefill=active.need))

    def ended(self, request_id: str) -> None:
        """No copy is in flight into the request's blocks: the engine may free them."""
        self._engine.abort(request_id)

"""Prefills for peers: hand-offs on one side, an engine on the other.

A prefill is an ordinary request of the engine under the hand-off's id, marked `prefill_only`: the engine pins its
blocks as they fill, and ends it with the first token. Where several choices are to continue the prompt they are forks
of that request, which end with a first token each, all in one step. What the steps say of it goes to the hand-off; pins
that arrive for one which is not known any more go straight back.

If the plan names a third worker that caches a longer prefix, that prefix is pulled from it first, and the rest
computed. A pull that fails costs a recompute of what it did not bring, nothing else.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from uuid import uuid4

from engine.outputs import ReceiveTarget, RequestOutput, StepResult
from engine.request import Request
from engine.sampling_params import FinishReason, SamplingParams
from kvtransfer.client import GrpcTransport
from kvtransfer.errors import Code, HandoffRefused
from kvtransfer.events import Computed, Failed, Filled, HandoffResult, HolderLost, Started
from kvtransfer.messages import Complete, Open, PrefillSource
from kvtransfer.ports import HolderListener
from kvtransfer.puller import Puller
from kvtransfer.sampling_wire import prompt_logprobs_to_wire
from tandem.v1 import worker_pb2 as pb
from worker.context import WorkerContext
from worker.lender import CacheLender, cached_source
from worker.session import Session


@dataclass(slots=True)
class _Prefill:
    source: PrefillSource
    listener: HolderListener
    deadline: float
    queued_at: float
    fork_ids: tuple[str, ...]  # of its choices in the engine, in the order of their seeds; none: it is its own choice
    started_at: float | None = None
    outputs: list[RequestOutput] = field(default_factory=list)  # first tokens so far
    num_pulled_tokens: int = 0  # that a third worker had cached


class PrefillRole(CacheLender):
    """A prefill worker's `Role`: holder of prefills and cached prefixes, consumer of cached prefixes."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._context = context
        self._clock = context.clock
        self._prefills: dict[str, _Prefill] = {}
        self._of_output: dict[str, str] = {}  # engine id of a choice -> hand-off
        transport = GrpcTransport(tls=context.tls)
        self.puller = Puller(context.built.memory, context.layout, self, transport, times=context.times)

    @property
    def num_transferring(self) -> int:
        return self.puller.num_active

    # --- HolderPort

    def start_prefill(self, open: Open, listener: HolderListener) -> None:
        source = open.source
        assert isinstance(source, PrefillSource)
        if self._context.drain.draining:
            raise HandoffRefused(Code.FAILED_PRECONDITION, "the worker is draining")
        vocab_size = self._context.built.vocab_size
        if (largest := max(source.token_ids)) >= vocab_size:
            message = f"token id {largest} is out of range: the vocabulary has {vocab_size}"
            raise HandoffRefused(Code.INVALID_ARGUMENT, message)
        now = self._clock()
        fork_ids = tuple(f"{open.handoff_id}/{index}" for index in range(len(source.seeds)))
        try:
            request = _engine_request(source, open.handoff_id, source.params, now, receives_kv=_pulls_prefix(source))
            forks = [
                _engine_request(source, fork_id, replace(source.params, seed=seed), now)
                for fork_id, seed in zip(fork_ids, source.seeds, strict=True)
            ]
        except ValueError as exc:
            raise HandoffRefused(Code.INVALID_ARGUMENT, str(exc)) from exc
        self._prefills[open.handoff_id] = _Prefill(source, listener, now + open.timeout_s, now, fork_ids)
        self._of_output.update(dict.fromkeys(fork_ids or (open.handoff_id,), open.handoff_id))
        self._context.drain.enter()
        self._engine.add_request(request, partial(self._refused, open.handoff_id), forks)

    def abort(self, handoff_id: str) -> None:
        # With an open pull the engine frees the blocks only when no copy is in flight into them: see `ended`.
        if self._forget(handoff_id) is not None and not self.puller.abort(handoff_id):
            self._engine.abort(handoff_id)

    def _refused(self, handoff_id: str, code: Code, message: str) -> None:
        if (prefill := self._forget(handoff_id)) is not None:
            prefill.listener(Failed(code, message, refused=True))

    def _forget(self, handoff_id: str) -> _Prefill | None:
        prefill = self._prefills.pop(handoff_id, None)
        if prefill is not None:
            for request_id in prefill.fork_ids or (handoff_id,):
                del self._of_output[request_id]
            self._context.drain.leave()
        return prefill

    # --- what the engine says

    def on_step(self, result: StepResult) -> None:
        for target in result.received_targets:
            self._pull_prefix(target)
        for request_id in result.admitted:
            if (prefill := self._prefills.get(request_id)) is not None:
                prefill.started_at = result.started_at
                prefill.listener(Started())
        for filled in result.filled:
            if (prefill := self._prefills.get(filled.request_id)) is not None:
                prefill.listener(Filled(filled.first, filled.block_ids, filled.num_tokens, filled.group, result.fence))
            else:
                self.unpin(filled.block_ids)
        for output in result.outputs:
            if (handoff_id := self._of_output.get(output.request_id)) is not None:
                prefill = self._prefills[handoff_id]
                if output.finish_reason is FinishReason.ABORT:
                    self._forget(handoff_id)
                    message = "a text could not be held to its structure any further"
                    prefill.listener(Failed(Code.INTERNAL, message))
                    continue
                prefill.outputs.append(output)
                if len(prefill.outputs) == prefill.source.num_choices:
                    self._forget(handoff_id)
                    self._computed(prefill)

    def _computed(self, prefill: _Prefill) -> None:
        now = self._clock()
        started_at = prefill.started_at if prefill.started_at is not None else now
        first = prefill.outputs[0]
        prompt_logprobs = None
        if (num_top := prefill.source.params.prompt_logprobs) is not None:
            assert first.prompt_logprobs is not None, f"{first.request_id} came without its prompt's log-probabilities"
            prompt_logprobs = prompt_logprobs_to_wire(first.prompt_logprobs, num_top)
        prefill.listener(
            Computed(
                tuple(output.token for output in prefill.outputs),
                num_tokens=len(prefill.source.token_ids),
                num_cached_tokens=max(first.num_cached_tokens, prefill.num_pulled_tokens),
                queued_s=started_at - prefill.queued_at,
                prefill_s=now - started_at,
                prompt_logprobs=prompt_logprobs,
            )
        )

    def on_failure(self, error: BaseException) -> None:
        for handoff_id in list(self._prefills):
            if (prefill := self._forget(handoff_id)) is not None:
                prefill.listener(Failed(Code.INTERNAL, f"the engine failed: {type(error).__name__}: {error}"))

    # --- a prefix from a third worker (ConsumerPort)

    def _pull_prefix(self, target: ReceiveTarget) -> None:
        prefill = self._prefills.get(target.request_id)
        if prefill is None:
            return
        source = cached_source(
            self._context,
            prefill.source.token_ids,
            prefill.source.cache_salt,
            prefill.source.num_cached_blocks,
            skip_blocks=target.num_cached_blocks,
        )
        timeout_s = prefill.deadline - self._clock()
        if len(source.block_hashes) <= target.num_cached_blocks or timeout_s <= 0:
            self._compute_from(target.request_id, target.num_cached_blocks)
            return
        open = Open(
            handoff_id=uuid4().hex,
            request_id=target.request_id,
            consumer_instance_id=self._context.instance_id,
            fingerprint=self._context.layout.fingerprint,
            timeout_s=timeout_s,
            source=source,
        )
        assert prefill.source.cached_on_address
        self.puller.pull(prefill.source.cached_on_address, open, target.block_tables)

    def _compute_from(self, handoff_id: str, num_blocks: int) -> None:
        """The leading blocks are real; the rest is to be computed."""
        num_tokens = num_blocks * self._context.layout.block_size
        self._engine.finish_receiving(handoff_id, num_tokens, None)

    def first_tokens(self, request_id: str, complete: Complete) -> None:
        raise AssertionError(f"a cached prefix came with {len(complete.first_tokens)} tokens, for {request_id}")

    def commit_blocks(self, request_id: str, num_blocks: int) -> None:
        self._engine.commit_blocks(request_id, num_blocks)

    def committed(self, request_id: str, result: HandoffResult) -> None:
        self._context.metrics.observe_transfer(result.stats)
        self._pulled(request_id, result.num_blocks)

    def holder_lost(self, request_id: str, lost: HolderLost) -> None:
        self._pulled(request_id, lost.num_confirmed_blocks)

    def _pulled(self, request_id: str, num_blocks: int) -> None:
        if (prefill := self._prefills.get(request_id)) is not None:
            prefill.num_pulled_tokens = num_blocks * self._context.layout.block_size
        self._compute_from(request_id, num_blocks)

    def ended(self, request_id: str) -> None:
        self._engine.abort(request_id)

    # --- SessionHandler: gateways listen to the load of a prefill worker, and submit nothing

    def submit(self, session: Session, submit: pb.Submit) -> None:
        message = "a prefill worker takes hand-offs from decode workers, not requests"
        session.refuse(submit.request_id, Code.FAILED_PRECONDITION, message)

    def assign(self, session: Session, assign: pb.Assign) -> None:
        """Nothing was submitted."""

    def abort_requests(self, session: Session, request_ids: list[str]) -> None:
        """Nothing was submitted."""

    def session_ended(self, session: Session) -> None:
        """Nothing was submitted."""


def _pulls_prefix(source: PrefillSource) -> bool:
    """Log-probabilities of the prompt come of computing it: then nobody's cache helps."""
    return bool(source.cached_on_address) and source.num_cached_blocks > 0 and source.params.prompt_logprobs is None


def _engine_request(
    source: PrefillSource, request_id: str, params: SamplingParams, now: float, *, receives_kv: bool = False
) -> Request:
    """The prefill in the engine, or one of its forks.

    Raises:
        ValueError: an empty prompt, nothing left to generate.
    """
    return Request(
        request_id,
        source.token_ids[: source.num_prompt_tokens],
        params,
        arrival_time=now,
        cache_salt=source.cache_salt,
        priority=source.priority,
        resume_token_ids=source.token_ids[source.num_prompt_tokens :],
        receives_kv=receives_kv,
        prefill_only=True,
    )

"""Who computes what in the next step, and who gets blocks: continuous batching as a plain state machine.

A step, in this order, under one budget of tokens:

1. *Decodes.* Every running request gets slots for its tokens, oldest first; those with one token to compute are part
   of the step. If the pool has no block for it, the newest running request is preempted: its blocks go back, it waits
   again at the front, and computes again later what is not cached by then. The oldest is thus never disturbed.
2. *Prefill chunks* of running requests, oldest first, with what is left of the budget.
3. *Admission*, strictly in the order of the queue: nobody is overtaken for being large. A request is admitted when the
   pool holds its tokens, and what it and all who run or receive are expected to generate; alone, when it holds its
   tokens, so that there is always progress. Requests that receive their KV get their blocks reserved and then wait for
   the worker; these blocks are never taken for others.

When a prompt of several choices is computed, its forks take its seat and what seats are left, see `forking`.

Requests that the pool could not hold even alone are refused when they come.
"""

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.admission import Admission
from engine.config import EngineConfig
from engine.errors import QueueFull
from engine.executor import ModelOutput, SampledToken, ScheduledRequest, SchedulerOutput
from engine.forking import attach, check_fork_tokens, check_forks, detach, inherit
from engine.kvcache.block_hash import root_hash
from engine.kvcache.manager import KVCacheManager
from engine.outputs import FilledBlocks, ReceiveTarget, RequestOutput
from engine.request import Request, RequestStatus
from engine.sampling_params import FinishReason, finish_reason_after
from engine.stats import SchedulerCounters
from engine.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class Schedule:
    """What `Scheduler.schedule` decided."""

    step: SchedulerOutput
    received_targets: tuple[ReceiveTarget, ...]
    preempted: tuple[str, ...]
    admitted: tuple[str, ...]


class Scheduler:
    """Owns the requests; the manager owns their blocks.

    Args:
        fingerprint: of model and layout, the root of all block hashes.
    """

    def __init__(self, config: EngineConfig, manager: KVCacheManager, *, fingerprint: bytes, vocab_size: int) -> None:
        self.config = config
        self.manager = manager
        self.counters = SchedulerCounters()
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # by `order`, oldest first
        self.receiving: dict[str, Request] = {}
        self.forking: dict[str, Request] = {}  # forks whose prompt is not computed yet
        self._fingerprint = fingerprint
        self._admission = Admission(config, manager, vocab_size)
        self._num_added = 0
        # Whether the head of the queue was tried and had to stay, and nothing that could help has happened since.
        self._is_stalled = False

    # --- events

    def add_request(self, request: Request, forks: Sequence[Request] = ()) -> None:
        """Queues the request, or the prompt of these forks.

        Raises:
            ValueError: it is no good, too long, or could never fit; the message has the numbers.
            QueueFull: too many wait already.
        """
        names = [request.request_id, *(fork.request_id for fork in forks)]
        for index, name in enumerate(names):
            if name in self.requests or name in names[:index]:
                raise ValueError(f"request {name} is here already")
        if forks:
            check_forks(request, forks)
        self._admission.check(request)  # and so its forks, each of which may come to run alone
        if len(self.waiting) + len(self.forking) >= self.config.max_waiting:
            raise QueueFull(self.config.max_waiting)
        for new in (request, *forks):
            new.max_num_slots = self._admission.max_num_slots(new)
            new.root_hash = root_hash(self._fingerprint, new.cache_salt)
            new.order = (new.priority, new.arrival_time, self._num_added)
            self._num_added += 1
            self.requests[new.request_id] = new
        if forks:
            attach(request, forks)
            self.forking.update((fork.request_id, fork) for fork in forks)
        self.waiting.push(request)
        self.wake()

    def abort(self, request_id: str) -> bool:
        """Ends the request and the forks that wait for it, whatever its state; False if there is none of this name."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        for fork in tuple(request.forks or ()):
            self._finish(fork, FinishReason.ABORT)
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        self._finish(request, FinishReason.ABORT)
        return True

    def commit_blocks(self, request_id: str, num_blocks: int) -> None:
        """Leading blocks of a receiving request are filled: full ones enter the cache.

        The block of the last token stays out until the request runs: if the peer is lost, that token is computed here,
        into this block, and what is cached must never be written again.
        """
        request = self._receiving(request_id)
        num_full = min(num_blocks, (request.num_tokens - 1) // self.config.block_size)
        self.manager.cache_blocks(request_id, request.hashes(self.config.block_size), num_full)
        self.wake()

    def finish_receiving(
        self,
        request_id: str,
        num_tokens: int,
        first_token: int | None,
        fork_tokens: Mapping[str, int] | None = None,
    ) -> FinishReason | None:
        """The KV of `num_tokens` leading tokens is in the request's blocks: it runs from now on.

        Args:
            first_token: the next token, sampled by the peer and delivered; None: it is sampled here.
            fork_tokens: likewise, of a prompt: of each of its forks.

        Raises:
            ValueError: no such request receives, or the numbers contradict its tokens.
        """
        request = self._receiving(request_id)
        is_sampled = first_token is not None or fork_tokens is not None
        if request.prefill_only and is_sampled:
            raise ValueError(f"{request_id} is to be prefilled here: its next token cannot come from a peer")
        if not 0 <= num_tokens <= request.num_tokens:
            raise ValueError(f"{num_tokens} tokens received of {request.num_tokens} that {request_id} has")
        check_fork_tokens(request, first_token, fork_tokens)
        del self.receiving[request_id]
        request.receives_kv = False
        if is_sampled:
            request.prompt_logprobs = None  # told with the first token
        elif request.num_missing_prompt_logprobs > 0:
            request.num_cached_tokens = 0  # all is computed here, for the logits of every token
            self._wait_again(request)
            return None
        is_whole = num_tokens == request.num_tokens and is_sampled
        if not is_whole:
            # What was committed before counts. The rest is computed here: the peer was lost, perhaps after it had
            # sampled. The prompt's last token always is if there is no next one yet, for its logits.
            num_committed = self.manager.num_registered_blocks(request_id) * self.config.block_size
            num_tokens = min(max(num_tokens, num_committed), request.num_tokens - 1)
        block_size = self.config.block_size
        self.manager.cache_blocks(request_id, request.hashes(block_size), num_tokens // block_size)
        request.num_computed_tokens = num_tokens
        self._run(request)
        self.wake()
        if first_token is not None:
            return self._append_token(request, first_token)
        if fork_tokens is not None:
            for fork in tuple(request.forks or ()):
                self._append_token(fork, fork_tokens[fork.request_id])
            if is_whole or not request.forks:
                self._fork(request, {})
        return None

    def wake(self) -> None:
        """Something happened that may let a waiting request in."""
        self._is_stalled = False

    @property
    def has_work(self) -> bool:
        """Whether `schedule` could decide something now."""
        return bool(self.running) or (len(self.waiting) > 0 and not self._is_stalled)

    # --- a step

    def schedule(self, now: float) -> Schedule:
        """Decides the next step; `update` must follow if it has requests."""
        preempted: list[str] = []
        scheduled = self._schedule_decodes(preempted)
        budget = self.config.max_num_batched_tokens - len(scheduled)
        for request in self.running:
            if budget == 0:
                break
            if request.num_uncomputed_tokens > 1:
                budget -= self._schedule_tokens(request, budget, scheduled)
        admitted: list[str] = []
        targets: list[ReceiveTarget] = []
        if not preempted:  # else what was just given up would be asked for again
            self._admit(now, budget, scheduled, admitted, targets)
        step = SchedulerOutput(tuple(scheduled), self.manager.take_copies())
        return Schedule(step, tuple(targets), tuple(preempted), tuple(admitted))

    def update(self, step: SchedulerOutput, output: ModelOutput) -> tuple[list[RequestOutput], list[FilledBlocks]]:
        """Takes in what the executor computed."""
        outputs: list[RequestOutput] = []
        filled: list[FilledBlocks] = []
        block_size = self.config.block_size
        for scheduled in step.requests:
            request = self.requests[scheduled.request_id]
            request.num_computed_tokens += len(scheduled.token_ids)
            self.counters.num_computed_tokens += len(scheduled.token_ids)
            num_full = request.num_computed_tokens // block_size
            if num_full > scheduled.num_computed_tokens // block_size:
                self.manager.cache_blocks(request.request_id, request.hashes(block_size), num_full)
            if request.prefill_only:
                self._report_filled(request, filled)
            if scheduled.prompt_targets and request.prompt_logprobs is not None:
                first, found = scheduled.num_computed_tokens, output.prompt_logprobs[request.request_id]
                request.prompt_logprobs[first : first + len(found)] = found  # some may be computed again
            if request.forks is not None:
                if request.num_uncomputed_tokens == 0:
                    outputs += self._fork(request, output.sampled)
            elif scheduled.sampling is not None:
                token = output.sampled[request.request_id]
                outputs.append(self._take_token(request, token, request.take_prompt_logprobs()))
        return outputs, filled

    def _schedule_decodes(self, preempted: list[str]) -> list[ScheduledRequest]:
        scheduled: list[ScheduledRequest] = []
        index = 0
        while index < len(self.running):  # preemption shortens the list at its end
            request = self.running[index]
            while not self.manager.allocate_slots(request.request_id, request.num_tokens):
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim.request_id)
                if victim is request:
                    return scheduled
            if request.num_uncomputed_tokens == 1:
                self._schedule_tokens(request, 1, scheduled)
            index += 1
        return scheduled

    def _schedule_tokens(self, request: Request, budget: int, scheduled: list[ScheduledRequest]) -> int:
        """Adds the next tokens of a running request to the step; how many."""
        first = request.num_computed_tokens
        end = min(request.num_tokens, first + budget)
        samples = end == request.num_tokens
        forks = request.forks or () if samples else ()
        wants_targets = request.num_missing_prompt_logprobs > 0
        scheduled.append(
            ScheduledRequest(
                request_id=request.request_id,
                token_ids=request.token_ids[first:end],
                num_computed_tokens=first,
                block_tables=self.manager.block_tables(request.request_id),
                sampling=request.sampling_input if samples and request.forks is None else None,
                is_prompt=first < request.num_prompt_tokens,
                forks=[(fork.request_id, fork.sampling_input) for fork in forks if not fork.output_token_ids],
                prompt_targets=request.prompt_token_ids[first + 1 : end + 1] if wants_targets else (),
                num_prompt_top=request.params.prompt_logprobs or 0,
            )
        )
        return end - first

    def _preempt(self, request: Request) -> None:
        assert request.status is RequestStatus.RUNNING, f"only running requests are preempted, not {request}"
        self.running.remove(request)
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._wait_again(request)

    # --- admission

    def _admit(
        self,
        now: float,
        budget: int,
        scheduled: list[ScheduledRequest],
        admitted: list[str],
        targets: list[ReceiveTarget],
    ) -> None:
        while self._num_seats > 0:
            request = self.waiting.peek()
            if request is None or (budget == 0 and not request.receives_kv):
                break
            if not self._admission.reserve(request, (*self.running, *self.receiving.values())):
                break
            self.waiting.pop()
            num_cached = self.manager.num_registered_blocks(request.request_id)
            request.num_computed_tokens = num_cached * self.config.block_size
            if request.first_scheduled_time is None:
                request.first_scheduled_time = now
                request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
                self.counters.num_prefix_queries += request.num_tokens
                self.counters.num_prefix_hits += request.num_computed_tokens
                admitted.append(request.request_id)
            if request.receives_kv:
                request.status = RequestStatus.RECEIVING
                self.receiving[request.request_id] = request
                tables = self.manager.block_tables(request.request_id)
                targets.append(ReceiveTarget(request.request_id, tuple(map(tuple, tables)), num_cached))
            else:
                self._run(request)
                budget -= self._schedule_tokens(request, budget, scheduled)
        self._is_stalled = True

    # --- transitions

    @property
    def _num_seats(self) -> int:
        """How many more may run or receive."""
        return self.config.max_num_seqs - len(self.running) - len(self.receiving)

    def _receiving(self, request_id: str) -> Request:
        request = self.receiving.get(request_id)
        if request is None:
            raise ValueError(f"no request {request_id} is receiving")
        return request

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=lambda running: running.order)

    def _wait_again(self, request: Request) -> None:
        """Takes the blocks of a request that is in no list any more, if it has some; it goes on later."""
        self.manager.free(request.request_id)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        self.waiting.push(request)
        self.wake()

    def _fork(self, prompt: Request, sampled: Mapping[str, SampledToken]) -> list[RequestOutput]:
        """The prompt is computed: its forks get their first tokens, and go on without it.

        Args:
            sampled: those of the forks that have none yet.
        """
        outputs: list[RequestOutput] = []
        prompt_logprobs = prompt.take_prompt_logprobs()
        for fork in tuple(prompt.forks or ()):
            inherit(fork, prompt)
            if not fork.output_token_ids:
                outputs.append(self._take_token(fork, sampled[fork.request_id], prompt_logprobs))
            if fork.status is RequestStatus.FINISHED:
                continue
            self._detach(fork)
            if self._num_seats >= 0:  # the prompt's own is free
                self.manager.fork(prompt.request_id, fork.request_id)
                fork.num_computed_tokens = prompt.num_computed_tokens
                self._run(fork)
            else:
                self._wait_again(fork)
        self._finish(prompt, None)
        return outputs

    def _detach(self, fork: Request) -> None:
        detach(fork)
        del self.forking[fork.request_id]

    def _take_token(
        self, request: Request, token: SampledToken, prompt_logprobs: tuple[SampledToken, ...] | None
    ) -> RequestOutput:
        is_first = not request.has_new_token
        self.counters.num_sampled_tokens += 1
        finish_reason = self._append_token(request, token.token_id)
        assert request.first_scheduled_time is not None, f"{request} got a token without being admitted"
        return RequestOutput(
            request_id=request.request_id,
            token=token,
            finish_reason=finish_reason,
            matched_token_id=token.token_id if finish_reason is FinishReason.STOP else None,
            is_first=is_first,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            arrival_time=request.arrival_time,
            first_scheduled_time=request.first_scheduled_time,
            prompt_logprobs=prompt_logprobs,
        )

    def _append_token(self, request: Request, token_id: int) -> FinishReason | None:
        request.append_token(token_id)
        reason = finish_reason_after(
            request.params, token_id, len(request.output_token_ids), request.num_tokens, self.config.max_model_len
        )
        if reason is None and request.prefill_only:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(request, reason)
        return reason

    def _report_filled(self, request: Request, filled: list[FilledBlocks]) -> None:
        """Pins the prefill_only request's blocks that were filled since the last report."""
        num_tokens = request.num_computed_tokens
        is_complete = num_tokens == request.num_tokens
        num_full = num_tokens // self.config.block_size
        end = self.manager.num_blocks_for(num_tokens) // len(self.manager.specs) if is_complete else num_full
        first = request.num_filled_blocks
        if end <= first:
            return
        for group, table in enumerate(self.manager.block_tables(request.request_id)):
            block_ids = tuple(table[first:end])
            self.manager.pin(block_ids)
            num_filled = num_tokens if is_complete else num_full * self.config.block_size
            filled.append(FilledBlocks(request.request_id, group, first, block_ids, num_filled))
        request.num_filled_blocks = end

    def _finish(self, request: Request, reason: FinishReason | None) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.FORKING:
            self._detach(request)
        self.receiving.pop(request.request_id, None)
        self.manager.free(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]
        self.wake()

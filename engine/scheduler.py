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

from collections.abc import Sequence
from dataclasses import dataclass

from engine.admission import Admission
from engine.config import EngineConfig
from engine.errors import QueueFull
from engine.executor import ModelOutput, SamplingInput, ScheduledRequest, SchedulerOutput
from engine.forking import check_forks, fork_off
from engine.kvcache.block_hash import root_hash
from engine.kvcache.manager import KVCacheManager
from engine.outputs import FilledBlocks, ReceiveTarget, RequestOutput
from engine.request import Request, RequestStatus
from engine.requests import Requests
from engine.sampling_params import FinishReason
from engine.stats import SchedulerCounters


@dataclass(frozen=True, slots=True)
class Schedule:
    """What `Scheduler.schedule` decided."""

    step: SchedulerOutput
    received_targets: tuple[ReceiveTarget, ...]
    preempted: tuple[str, ...]
    admitted: tuple[str, ...]


class Scheduler:
    """Decides over the requests and their blocks.

    Args:
        fingerprint: of model and layout, the root of all block hashes.
    """

    def __init__(self, config: EngineConfig, manager: KVCacheManager, *, fingerprint: bytes, vocab_size: int) -> None:
        self.config = config
        self.manager = manager
        self.counters = SchedulerCounters()
        self.requests = Requests(config, manager, self.counters)
        self._fingerprint = fingerprint
        self._admission = Admission(config, manager, vocab_size)
        self._num_added = 0

    # --- events

    def add_request(self, request: Request, forks: Sequence[Request] = ()) -> None:
        """Queues the request, or the prompt of these forks.

        Raises:
            ValueError: it is no good, too long, or could never fit; the message has the numbers.
            QueueFull: too many wait already.
        """
        names = [request.request_id, *(fork.request_id for fork in forks)]
        for index, name in enumerate(names):
            if name in self.requests.by_id or name in names[:index]:
                raise ValueError(f"request {name} is here already")
        if forks:
            check_forks(request, forks)
        self._admission.check(request)  # and so its forks, each of which may come to run alone
        if self.requests.num_waiting >= self.config.max_waiting:
            raise QueueFull(self.config.max_waiting)
        for new in (request, *forks):
            new.max_num_slots = self._admission.max_num_slots(new)
            new.root_hash = root_hash(self._fingerprint, new.cache_salt)
            new.order = (new.priority, new.arrival_time, self._num_added)
            self._num_added += 1
        self.requests.add(request, forks)

    def abort(self, request_id: str) -> bool:
        """Ends the request and the forks that wait for it, whatever its state; False if there is none of this name."""
        request = self.requests.by_id.get(request_id)
        if request is None:
            return False
        self.requests.finish(request, FinishReason.ABORT)
        return True

    # --- a step

    def schedule(self, now: float) -> Schedule:
        """Decides the next step; `update` must follow if it has requests."""
        preempted: list[str] = []
        scheduled = self._schedule_decodes(preempted)
        budget = self.config.max_num_batched_tokens - len(scheduled)
        for request in self.requests.running:
            if budget == 0:
                break
            if request.num_uncomputed_tokens > 1:
                budget -= self._schedule_tokens(request, budget, scheduled)
        admitted: list[str] = []
        targets: list[ReceiveTarget] = []
        if not preempted:  # else what was just given up would be asked for again
            self._admit(now, budget, scheduled, admitted, targets)
        step = SchedulerOutput(tuple(scheduled), self.manager.take_copies())
        # Who got a copy has one token to compute, and only newer requests are preempted after it.
        assert step.requests or not step.block_copies, f"{step.block_copies} to copy, but nobody computes"
        return Schedule(step, tuple(targets), tuple(preempted), tuple(admitted))

    def update(self, step: SchedulerOutput, output: ModelOutput) -> tuple[list[RequestOutput], list[FilledBlocks]]:
        """Takes in what the executor computed."""
        outputs: list[RequestOutput] = []
        filled: list[FilledBlocks] = []
        block_size = self.config.block_size
        for scheduled in step.requests:
            request = self.requests.by_id[scheduled.request_id]
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
                    outputs += fork_off(request, output.sampled, self.requests, self.manager)
            elif scheduled.sampling is not None:
                token = output.sampled[request.request_id]
                outputs.append(self.requests.take_token(request, token, request.take_prompt_logprobs()))
        return outputs, filled

    def _schedule_decodes(self, preempted: list[str]) -> list[ScheduledRequest]:
        scheduled: list[ScheduledRequest] = []
        running = self.requests.running
        index = 0
        while index < len(running):  # preemption shortens the list at its end
            request = running[index]
            while not self.manager.allocate_slots(request.request_id, request.num_tokens):
                victim = running[-1]
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
        sampling: SamplingInput | None = None
        forks: tuple[tuple[str, SamplingInput], ...] = ()
        targets: tuple[int, ...] = ()
        if end == request.num_tokens:
            if request.forks is None:
                sampling = request.sampling_input
            else:
                forks = tuple((f.request_id, f.sampling_input) for f in request.forks if not f.output_token_ids)
        if request.prompt_logprobs is not None and request.num_missing_prompt_logprobs > 0:
            targets = request.prompt_token_ids[first + 1 : end + 1]
        scheduled.append(
            ScheduledRequest(
                request_id=request.request_id,
                token_ids=request.token_ids[first:end],
                num_computed_tokens=first,
                block_tables=self.manager.block_tables(request.request_id),
                sampling=sampling,
                is_prompt=first < request.num_prompt_tokens,
                forks=forks,
                prompt_targets=targets,
                num_prompt_top=request.params.prompt_logprobs or 0,
            )
        )
        return end - first

    def _preempt(self, request: Request) -> None:
        assert request.status is RequestStatus.RUNNING, f"only running requests are preempted, not {request}"
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.requests.wait_again(request)

    # --- admission

    def _admit(
        self,
        now: float,
        budget: int,
        scheduled: list[ScheduledRequest],
        admitted: list[str],
        targets: list[ReceiveTarget],
    ) -> None:
        requests = self.requests
        while requests.num_seats > 0:
            request = requests.waiting.peek()
            if request is None or (budget == 0 and not request.receives_kv):
                break
            if not self._admission.reserve(request, (*requests.running, *requests.receiving.values())):
                break
            requests.waiting.pop()
            num_cached = self.manager.num_registered_blocks(request.request_id)
            request.num_computed_tokens = num_cached * self.config.block_size
            if request.first_scheduled_time is None:
                request.first_scheduled_time = now
                request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
                self.counters.num_prefix_queries += request.num_tokens
                self.counters.num_prefix_hits += request.num_computed_tokens
                admitted.append(request.request_id)
            if request.receives_kv:
                requests.receive(request)
                tables = self.manager.block_tables(request.request_id)
                targets.append(ReceiveTarget(request.request_id, tuple(map(tuple, tables)), num_cached))
            else:
                requests.run(request)
                budget -= self._schedule_tokens(request, budget, scheduled)
        requests.is_stalled = True

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

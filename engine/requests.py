"""All requests of an engine, and where each is: what `request` draws as arrows happens here."""

from bisect import insort
from collections.abc import Sequence

from engine.config import EngineConfig
from engine.executor import SampledToken
from engine.kvcache.manager import KVCacheManager
from engine.outputs import RequestOutput
from engine.request import Request, RequestStatus
from engine.sampling_params import FinishReason, finish_reason_after
from engine.stats import SchedulerCounters
from engine.waiting_queue import WaitingQueue


class Requests:
    """Each is in the collection that its status names; who stops running or receiving gives its blocks back."""

    def __init__(self, config: EngineConfig, manager: KVCacheManager, counters: SchedulerCounters) -> None:
        self._config = config
        self._manager = manager
        self._counters = counters
        self.by_id: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # by `order`, oldest first
        self.receiving: dict[str, Request] = {}
        self.forking: dict[str, Request] = {}
        # Whether the head of the queue was tried and had to stay, and nothing that could help has happened since.
        self.is_stalled = False

    @property
    def num_waiting(self) -> int:
        """For blocks, or for their prompt."""
        return len(self.waiting) + len(self.forking)

    @property
    def num_seats(self) -> int:
        """How many more may run or receive."""
        return self._config.max_num_seqs - len(self.running) - len(self.receiving)

    @property
    def has_work(self) -> bool:
        """Whether a next step could do something now."""
        return bool(self.running) or (len(self.waiting) > 0 and not self.is_stalled)

    def wake(self) -> None:
        """Something happened that may let a waiting request in."""
        self.is_stalled = False

    # --- transitions

    def add(self, request: Request, forks: Sequence[Request] = ()) -> None:
        """A new request waits, its forks with it."""
        self.by_id[request.request_id] = request
        if forks:
            request.forks = list(forks)
        for fork in forks:
            fork.status = RequestStatus.FORKING
            fork.prompt = request
            self.by_id[fork.request_id] = self.forking[fork.request_id] = fork
        self._wait(request)

    def run(self, request: Request) -> None:
        """A request that holds blocks computes from now on."""
        self.receiving.pop(request.request_id, None)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=lambda running: running.order)

    def receive(self, request: Request) -> None:
        """A request that holds blocks waits until somebody has filled them."""
        request.status = RequestStatus.RECEIVING
        self.receiving[request.request_id] = request

    def wait_again(self, request: Request) -> None:
        """Takes its blocks from a request; it goes on later."""
        self._leave(request)
        request.num_computed_tokens = 0
        self._wait(request)

    def detach(self, fork: Request) -> None:
        """A fork is its prompt's no more; what it is now, the caller says."""
        assert fork.prompt is not None, f"{fork} waits for no prompt"
        assert fork.prompt.forks is not None, f"{fork.prompt} has no forks"
        fork.prompt.forks.remove(fork)
        fork.prompt = None
        del self.forking[fork.request_id]

    def finish(self, request: Request, reason: FinishReason | None) -> None:
        """Ends a request, whatever its state, and the forks that wait for it."""
        for fork in tuple(request.forks or ()):
            self.finish(fork, reason)
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        self._leave(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.by_id[request.request_id]
        self.wake()

    def append_token(self, request: Request, token_id: int) -> FinishReason | None:
        """Why the request ended, if it did with its new token."""
        request.append_token(token_id)
        max_model_len = self._config.max_model_len
        num_output_tokens = len(request.output_token_ids)
        reason = finish_reason_after(request.params, token_id, num_output_tokens, request.num_tokens, max_model_len)
        matcher = request.sampling_input.matcher
        if matcher is not None and matcher.has_given_up:
            reason = FinishReason.ABORT  # the token is the end, but not the structure's: none of it is to be shown
        if reason is None and request.prefill_only:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.finish(request, reason)
        return reason

    def take_token(
        self, request: Request, token: SampledToken, prompt_logprobs: tuple[SampledToken, ...] | None
    ) -> RequestOutput:
        """As `append_token`, of a token that was sampled here; what is to be told of it."""
        is_first = not request.has_new_token
        self._counters.num_sampled_tokens += 1
        finish_reason = self.append_token(request, token.token_id)
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

    def _wait(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self.waiting.push(request)
        self.wake()

    def _leave(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.FORKING:
            self.detach(request)
        self.receiving.pop(request.request_id, None)
        self._manager.free(request.request_id)

    # --- proof

    def check_integrity(self) -> None:
        """Proves each request where its status says, and that none holds blocks but those that run or receive.

        Raises:
            AssertionError: it does not hold; the message has the numbers.
        """
        by_status = dict.fromkeys(RequestStatus, 0)
        for request in self.by_id.values():
            by_status[request.status] += 1
            is_holding = request.status in (RequestStatus.RUNNING, RequestStatus.RECEIVING)
            assert self._manager.holds(request.request_id) == is_holding, (
                f"{request} must hold blocks only while it runs"
            )
            assert is_holding or request.num_computed_tokens == 0, f"{request} has no blocks, so nothing is computed"
            is_forking = request.status is RequestStatus.FORKING
            assert (request.prompt is not None) == is_forking, f"{request} waits for {request.prompt}"
            for fork in request.forks or ():
                assert fork.prompt is request, f"{fork} waits for {fork.prompt}, not for {request}"
                assert self.forking.get(fork.request_id) is fork, f"{fork} is not among those that wait to fork"
        expected = {
            RequestStatus.FORKING: len(self.forking),
            RequestStatus.WAITING: len(self.waiting),
            RequestStatus.RECEIVING: len(self.receiving),
            RequestStatus.RUNNING: len(self.running),
            RequestStatus.FINISHED: 0,
        }
        assert by_status == expected, f"requests are {by_status}, lists have {expected}"
        num_attached = sum(len(request.forks or ()) for request in self.by_id.values())
        assert num_attached == len(self.forking), f"{num_attached} forks of prompts, {len(self.forking)} wait to fork"
        num_holding = by_status[RequestStatus.RUNNING] + by_status[RequestStatus.RECEIVING]
        assert self._manager.num_holding == num_holding, f"{self._manager.num_holding} hold blocks, not {num_holding}"

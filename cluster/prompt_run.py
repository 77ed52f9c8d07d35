"""The choices of one prompt: to which workers they go, together at first, and each by itself once it has begun.

The first attempt is one Submit of all choices: the prompt is computed once. It is made when the first of them is read.
If it is lost before anything has come of it (the worker was full, or draining, or died), those that are left go
elsewhere together, again by one Submit, made when the first of them hears of the loss. A choice that has begun is
submitted again alone, with what it has generated. What was learnt of the workers that failed the prompt goes with them.
"""

from collections.abc import Sequence
from dataclasses import replace

from cluster import wire
from cluster.attempt import Attempt
from cluster.clock import Clock
from cluster.errors import DeadlineExceeded, GenerationError, NoWorker
from cluster.generator import GeneratorStats, SequenceRequest
from cluster.membership import Membership
from cluster.request_stream import RequestStream
from engine.kvcache.block_hash import BlockHash, extend_hashes, root_hash


class PromptRun:
    """One prompt on its way.

    Args:
        requests: its choices, which differ in their ids and seeds alone.
        wire_prefix: of all their names on the wire, which end with the number of the attempt: a worker must never take
            the remains of one for another.
    """

    def __init__(
        self,
        requests: Sequence[SequenceRequest],
        membership: Membership,
        stats: GeneratorStats,
        clock: Clock,
        *,
        wire_prefix: str,
        timeout_s: float,
    ) -> None:
        self.membership = membership
        self.ledger = membership.ledger
        self.stats = stats
        self.clock = clock
        self.timeout_s = timeout_s
        self.deadline = clock.time() + timeout_s
        self._requests = requests
        self._router = membership.router
        self._wire_prefix = wire_prefix
        model = membership.model
        self._block_size = model.block_size
        self._root = root_hash(model.fingerprint, requests[0].cache_salt)
        self._prompt_hashes: list[BlockHash] = []  # of its full blocks
        self._ended: set[str] = set()  # choices that want nothing any more
        # Attempts of all choices together, or why there is none, by the number of the attempt before (none: 0).
        self._together: dict[int, Attempt | GenerationError] = {}

    # --- attempts

    def begin(self, request: SequenceRequest) -> tuple[Attempt, RequestStream]:
        """The first attempt, which all choices share, and the stream of one of them.

        Raises:
            GenerationError: nothing could be submitted: to each choice the same.
        """
        return self._with_others(request, None)

    def move(self, request: SequenceRequest, delivered: Sequence[int], last: Attempt) -> tuple[Attempt, RequestStream]:
        """One choice, submitted elsewhere.

        Args:
            delivered: what it has generated.
            last: the attempt that was lost.

        Raises:
            GenerationError: there is no time, or nobody, left.
        """
        is_common = self._together.get(last.number - 1) is last
        if is_common and not last.streams.has_output:
            return self._with_others(request, last)
        attempt = self._submit((request,), delivered, last)
        return attempt, attempt.streams[attempt.wire_id]

    def end(self, request: SequenceRequest, num_left: int, error: GenerationError) -> None:
        """A choice has ended: it is not taken along any more, and leaves attempts that it was taken along to.

        Args:
            num_left: the number of the attempt that it has left last; 0: it was never read.
        """
        self._ended.add(request.request_id)
        for attempt in self._together.values():
            if isinstance(attempt, Attempt) and attempt.number > num_left:
                stream = attempt.streams.get(self._name(request, attempt.number))
                if stream is not None:
                    self.leave(attempt, stream, error)

    def _with_others(self, request: SequenceRequest, last: Attempt | None) -> tuple[Attempt, RequestStream]:
        before = 0 if last is None else last.number
        if before not in self._together:
            rest = [choice for choice in self._requests if choice.request_id not in self._ended]
            try:
                self._together[before] = self._submit(rest, (), last)
            except GenerationError as error:
                self._together[before] = error
        attempt = self._together[before]
        if isinstance(attempt, GenerationError):
            raise attempt
        return attempt, attempt.streams[self._name(request, attempt.number)]

    def _submit(self, requests: Sequence[SequenceRequest], delivered: Sequence[int], last: Attempt | None) -> Attempt:
        if self.membership.is_closed:
            raise shutting_down()
        request = requests[0]
        token_ids = [*request.prompt_token_ids, *delivered]
        hashes = self._hashes(request, token_ids)
        tried = set() if last is None else {*last.tried, last.plan.decode.instance_id}
        while True:
            now = self.clock.time()
            if now >= self.deadline:
                raise self.too_late()
            plan = self._router.choose(hashes, len(token_ids), now, exclude=tried)
            session = self.membership.session(plan.decode.instance_id)
            if session is not None and session.is_open:
                break
            tried.add(plan.decode.instance_id)
        number = 1 if last is None else last.number + 1
        if len(requests) == 1:
            wire_id, choices = self._name(request, number), []
        else:
            wire_id = f"{self._wire_prefix}.{number}"
            choices = [(self._name(choice, number), choice.params.seed) for choice in requests]
        message = wire.submit(wire_id, request, plan, delivered, self.deadline - now, choices)
        streams = session.submit(message)
        self.ledger.assign(wire_id, plan, now, len(requests))
        self.stats.planned_cached_tokens += plan.num_cached_blocks * self._block_size
        self.stats.local_fallbacks += plan.is_fallback
        return Attempt(
            number=number,
            plan=plan,
            session=session,
            streams=streams,
            block_hashes=hashes,
            num_tokens=len(token_ids),
            prefill_worker=plan.prefills.worker_id,
            num_repairs=0 if last is None else last.num_repairs,
            tried=tried,
        )

    def _name(self, request: SequenceRequest, number: int) -> str:
        return f"{self._wire_prefix}-{request.request_id}.{number}"

    def _hashes(self, request: SequenceRequest, token_ids: Sequence[int]) -> Sequence[BlockHash]:
        """Of the full blocks whose being cached somewhere helps."""
        if request.params.prompt_logprobs is not None:
            return ()  # they come of computing the prompt, all of it
        hashes = self._prompt_hashes
        if len(token_ids) > len(request.prompt_token_ids):
            hashes = list(hashes)  # the prompt's are shared
        extend_hashes(hashes, self._root, token_ids, self._block_size)
        return hashes

    # --- what happens to an attempt

    def repair(self, attempt: Attempt, stream: RequestStream) -> None:
        """Names another prefill worker for all choices that are left, or lets the decode worker prefill.

        Args:
            stream: of the choice in whose name the worker asked.
        """
        now = self.clock.time()
        lost = attempt.plan.prefill
        if lost is not None:
            attempt.tried.add(lost.instance_id)
        attempt.num_repairs += 1
        prefill = self._router.choose_prefill(
            attempt.plan.decode, attempt.block_hashes, attempt.num_tokens, now, exclude=attempt.tried
        )
        self.ledger.reassign_prefill(attempt.wire_id, prefill, now)
        attempt.session.assign(stream, prefill)
        attempt.plan = replace(attempt.plan, prefill=prefill)
        attempt.prefill_worker = attempt.plan.prefills.worker_id
        attempt.is_repaired = True
        self.stats.repairs += 1
        self.stats.local_fallbacks += prefill is None

    def found_cached(self, attempt: Attempt, num_cached_tokens: int) -> None:
        """The worker says how much was cached; it says it of every choice."""
        if attempt.num_cached_tokens is None:
            attempt.num_cached_tokens = num_cached_tokens
            hoped = attempt.plan.num_cached_blocks * self._block_size
            self.stats.stale_hits += not attempt.is_repaired and num_cached_tokens < hoped

    def leave(self, attempt: Attempt, stream: RequestStream, error: GenerationError) -> None:
        """Ends one choice at the attempt's worker, if it has not ended there. Once for each choice."""
        attempt.session.abort(stream, error)
        self.ledger.release(attempt.wire_id)

    def too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request did not end within {self.timeout_s:g} s")


def shutting_down() -> NoWorker:
    return NoWorker("the server is shutting down")

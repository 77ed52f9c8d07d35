"""The generator over real workers: what is checked and bounded before a request becomes a `RequestRun`."""

import secrets
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from itertools import count

from cluster.choice_chunks import ChoiceChunks
from cluster.clock import Clock
from cluster.config import DEFAULT_MAX_CONCURRENT
from cluster.errors import GenerationError, InvalidRequest, QueueFull
from cluster.generator import (
    GeneratorStats,
    SequenceChunk,
    SequenceRequest,
    ServedModel,
    check_choices,
    check_priority,
)
from cluster.membership import Membership
from cluster.prompt_run import PromptRun
from cluster.request_run import RequestRun, RunLimits
from cluster.worker_info import WorkerStatus


class RoutedGenerator:
    """Sends requests to the workers of a `Membership`.

    Args:
        max_concurrent: requests in flight at this gateway; more are refused.
        clock: None: the membership's.
    """

    def __init__(
        self,
        membership: Membership,
        limits: RunLimits | None = None,
        *,
        max_concurrent: int = DEFAULT_MAX_CONCURRENT,
        clock: Clock | None = None,
    ) -> None:
        if max_concurrent < 1:
            raise ValueError(f"max_concurrent must be at least 1, not {max_concurrent}")
        self._membership = membership
        self._limits = limits or RunLimits()
        self._max_concurrent = max_concurrent
        self._clock = clock
        self._stats = GeneratorStats()
        self._reserved: set[str] = set()  # admitted, not begun
        self._active: set[str] = set()
        # Worker-side names of requests: no two gateways, nor two lives of one, may use the same.
        self._wire_prefix = secrets.token_hex(4)
        self._serial = count()

    @property
    def model(self) -> ServedModel:
        return self._membership.model

    @property
    def stats(self) -> GeneratorStats:
        return self._stats

    @property
    def max_concurrent(self) -> int:
        return self._max_concurrent

    async def wait_ready(self) -> None:
        """Returns once a request can be served: a decode worker is there."""
        await self._membership.wait_ready()

    def workers(self) -> Sequence[WorkerStatus]:
        """Every worker that the gateway was told of, ready or not, with its load."""
        return self._membership.workers()

    def generate(self, request: SequenceRequest) -> AsyncGenerator[SequenceChunk, None]:
        """Yields the sequence's chunks; see `Generator.generate`."""
        return self._chunks(_Choices((request,), self), request)

    def generate_choices(self, requests: Sequence[SequenceRequest]) -> list[AsyncGenerator[SequenceChunk, None]]:
        """One generator for each choice of a prompt; see `Generator.generate_choices`."""
        if len(requests) == 1:
            return [self.generate(requests[0])]
        check_choices(requests)
        choices = _Choices(requests, self)
        return [ChoiceChunks(self._chunks(choices, request), partial(choices.close, request)) for request in requests]

    async def _chunks(self, choices: "_Choices", request: SequenceRequest) -> AsyncGenerator[SequenceChunk, None]:
        try:
            async with aclosing(choices.begin(request).chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            choices.close(request)

    def begin(self, requests: Sequence[SequenceRequest]) -> dict[str, RequestRun]:
        """The choices of a prompt are in flight from now on, each until `end`. Their runs, by request id.

        Raises:
            GenerationError: one of them cannot be served, or there is no room for all that have no place yet.
        """
        if unreserved := [request for request in requests if request.request_id not in self._reserved]:
            self._reserve(unreserved)
        request_ids = [request.request_id for request in requests]
        self._reserved.difference_update(request_ids)
        self._active.update(request_ids)
        self._stats.num_active = len(self._active)
        timeout_s = requests[0].timeout_s
        prompt = PromptRun(
            requests,
            self._membership,
            self._stats,
            self._clock or self._membership.clock,
            wire_prefix=f"{self._wire_prefix}-{next(self._serial)}",
            timeout_s=self._limits.timeout_s if timeout_s is None else timeout_s,
        )
        return {request.request_id: RequestRun(request, prompt, self._limits) for request in requests}

    def end(self, request_id: str) -> None:
        """It is not in flight any more."""
        self._active.discard(request_id)
        self._stats.num_active = len(self._active)

    @contextmanager
    def admit(self, requests: Sequence[SequenceRequest]) -> Iterator[None]:
        """Takes a place for each sequence of a call; see `Generator.admit`."""
        self._reserve(requests)
        try:
            yield
        finally:
            self._reserved.difference_update(request.request_id for request in requests)

    def _reserve(self, requests: Sequence[SequenceRequest]) -> None:
        """Takes places for all, or raises and takes none."""
        # First, as it is least work: a crowd is refused without being looked at.
        num_taken = len(self._active) + len(self._reserved)
        if num_taken + len(requests) > self._max_concurrent:
            self._stats.queue_full += len(requests)
            more = f", and this call would add {len(requests)}" if len(requests) > 1 else ""
            raise QueueFull(f"{num_taken} requests are in flight{more}; this gateway takes {self._max_concurrent}")
        model = self.model
        checked: set[int] = set()
        request_ids: set[str] = set()
        for request in requests:
            self._check(request, model, checked)
            if any(request.request_id in ids for ids in (self._active, self._reserved, request_ids)):
                raise InvalidRequest(f"a request with the id {request.request_id!r} is in flight", param="request_id")
            request_ids.add(request.request_id)
        self._reserved |= request_ids

    def _check(self, request: SequenceRequest, model: ServedModel, checked: set[int]) -> None:
        """Raises if the request cannot be served.

        Args:
            checked: identities of collections of token ids that are known to be right: the choices of a prompt share
                theirs, which can be long.
        """
        num_prompt, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
        if not num_prompt:
            raise InvalidRequest("the prompt is empty: at least one token is needed", param="prompt")
        for param, token_ids in (
            ("prompt", request.prompt_token_ids),
            ("stop_token_ids", request.params.stop_token_ids),
            ("logit_bias", request.params.logit_bias),
        ):
            if id(token_ids) not in checked:
                _check_token_ids(param, token_ids, model.vocab_size)
                checked.add(id(token_ids))
        if num_prompt + max_tokens > model.max_model_len:
            raise InvalidRequest(
                f"This model's maximum context length is {model.max_model_len} tokens. However, you requested "
                f"{num_prompt + max_tokens} tokens ({num_prompt} in the prompt, {max_tokens} for the completion).",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if request.timeout_s is not None and not request.timeout_s > 0:
            raise InvalidRequest(f"timeout must be above 0 seconds, not {request.timeout_s}", param="timeout")
        check_priority(request.priority)


def _check_token_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    if not token_ids:
        return
    for token_id in (min(token_ids), max(token_ids)):  # in C, because prompts can be long
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"token id {token_id} of {param} is out of range: the vocabulary has the ids 0 to {vocab_size - 1}",
                param=param,
            )


class _Choices:
    """The choices of a prompt, from their being asked for: the first that is read begins them all."""

    def __init__(self, requests: Sequence[SequenceRequest], generator: RoutedGenerator) -> None:
        self._generator = generator
        self._open = {request.request_id: request for request in requests}  # not closed
        self._runs: dict[str, RequestRun] = {}
        self._error: GenerationError | None = None

    def begin(self, request: SequenceRequest) -> RequestRun:
        """
        Raises:
            GenerationError: they could not begin: to each of them the same.
        """
        if self._error is not None:
            raise self._error
        if not self._runs:
            try:
                self._runs = self._generator.begin(list(self._open.values()))
            except GenerationError as error:
                self._error = error
                raise
        return self._runs[request.request_id]

    def close(self, request: SequenceRequest) -> None:
        """Its reader has left, or it has ended. Idempotent."""
        if self._open.pop(request.request_id, None) is None:
            return
        if (run := self._runs.get(request.request_id)) is not None:
            run.close()
            self._generator.end(request.request_id)

"""The gateway's own gRPC API: `tandem.v1.Generation`, over the same text generation as HTTP.

A call's life: its message becomes a `TextRequest`; planned, or refused with a status; then each delta of a choice is a
`chunk` (if the client streams), and each choice's end a `complete`. Cancelling the call, its deadline, or `Abort` with
its request id closes the sequences at once. Trailers tell which workers served the call.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, NoReturn

import grpc

from cluster.errors import Cancelled, GenerationError, InvalidRequest, ModelNotFound
from cluster.generation_messages import ChoiceMessages, text_options, worker_info, worker_load
from cluster.text_generator import TextDelta, TextGenerator
from cluster.text_request import PlannedText, TextRequest
from tandem.v1 import generation_pb2, generation_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """Serves `tandem.v1.Generation`.

    Args:
        clock: monotonic seconds, for the uptime.
    """

    def __init__(self, text: TextGenerator, *, version: str, clock: Callable[[], float]) -> None:
        self._text = text
        self._version = version
        self._clock = clock
        self._start_time = clock()
        self._active: dict[str, asyncio.Task[Any]] = {}
        self._aborted: set[str] = set()

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Context) -> None:
        """Continues a prompt.

        It writes instead of yielding: so all of it is one task, and whatever cancels that closes the sequences.
        """
        request_id = request.request_id or f"grpc-{uuid.uuid4().hex}"
        try:
            with self._registered(request_id):
                planned = await self._plan(request, request_id, context.time_remaining())
                await self._write_responses(planned, request.stream, context)
        except asyncio.CancelledError:
            if request_id not in self._aborted:
                raise  # the client left, or its deadline passed
            task = asyncio.current_task()
            assert task is not None, "a handler runs in a task"
            task.uncancel()
            await _abort(context, Cancelled(f"request {request_id} was aborted"))
        except GenerationError as exc:
            await _abort(context, exc)
        finally:
            self._aborted.discard(request_id)

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        """Ends calls in flight by their request ids; unknown ids are passed over."""
        num_aborted = 0
        for request_id in request.request_ids:
            task = self._active.get(request_id)
            if task is not None and request_id not in self._aborted:
                self._aborted.add(request_id)
                task.cancel()
                num_aborted += 1
        return generation_pb2.AbortResponse(num_aborted=num_aborted)

    async def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: Context
    ) -> generation_pb2.GetModelInfoResponse:
        """What is served."""
        model = self._text.model
        return generation_pb2.GetModelInfoResponse(
            model_path=model.model_path,
            served_model_name=model.served_model_name,
            max_context_length=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=sorted(self._text.tokenizer.eos_token_ids),
            dtype=model.dtype,
            block_size=model.block_size,
        )

    async def GetServerInfo(
        self, request: generation_pb2.GetServerInfoRequest, context: Context
    ) -> generation_pb2.GetServerInfoResponse:
        """Who serves it."""
        generator = self._text.generator
        return generation_pb2.GetServerInfoResponse(
            version=self._version,
            uptime_seconds=self._clock() - self._start_time,
            active_requests=generator.stats.num_active,
            workers=[worker_info(worker) for worker in generator.workers()],
        )

    async def GetLoads(
        self, request: generation_pb2.GetLoadsRequest, context: Context
    ) -> generation_pb2.GetLoadsResponse:
        """How busy the workers last said they were."""
        workers = self._text.generator.workers()
        return generation_pb2.GetLoadsResponse(
            loads=[load for worker in workers if (load := worker_load(worker)) is not None]
        )

    @contextmanager
    def _registered(self, request_id: str) -> Iterator[None]:
        if request_id in self._active:
            raise InvalidRequest(f"a request with the id {request_id!r} is in flight", param="request_id")
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._active[request_id] = task
        try:
            yield
        finally:
            del self._active[request_id]

    async def _plan(
        self, request: generation_pb2.GenerateRequest, request_id: str, timeout_s: float | None
    ) -> PlannedText:
        name = self._text.model.served_model_name
        if request.HasField("model") and request.model != name:
            raise ModelNotFound(f"the model {request.model!r} does not exist; served is {name!r}", param="model")
        given = request.WhichOneof("input")
        if given is None:
            raise InvalidRequest("input is missing: give tokenized or text", param="input")
        prompt = request.text if given == "text" else tuple(request.tokenized.input_ids)
        options = text_options(request, timeout_s)
        return await self._text.plan(
            TextRequest(request_id=request_id, prompt=prompt, options=options, prompt_field=given)
        )

    async def _write_responses(self, planned: PlannedText, stream: bool, context: Context) -> None:
        choices = [ChoiceMessages(planned) for _ in range(planned.options.n)]
        async with aclosing(self._text.run([planned])) as deltas:
            async for delta in deltas:
                context.set_trailing_metadata(_trailers(delta))
                choice = choices[delta.index]
                choice.add(delta)
                if stream and (delta.tokens or delta.text):
                    await context.write(choice.chunk(delta))
                if delta.finish_reason is not None:
                    await context.write(choice.complete(delta))


def _trailers(delta: TextDelta) -> tuple[tuple[str, str], ...]:
    trailers = {
        "x-tandem-prefill-worker": delta.prefill_worker,
        "x-tandem-decode-worker": delta.decode_worker,
    }
    return tuple((key, value) for key, value in trailers.items() if value is not None)


async def _abort(context: Context, error: GenerationError) -> NoReturn:
    await context.abort(error.grpc_code, error.message, context.trailing_metadata() or ())
    raise AssertionError("unreachable: abort raises")

"""The gateway's own gRPC API: `tandem.v1.Generation`, over the same text generation as HTTP.

A call's life: its message becomes a `TextRequest`; planned, or refused with a status; then each delta of a choice is a
`chunk` (if the client streams), and each choice's end a `complete`. Cancelling the call, its deadline, or `Abort` with
its request id closes the sequences at once. Trailers tell which workers served the call, and how long they took.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import grpc

from cluster.call_context import REQUEST_ID, CallContext, call_context
from cluster.call_record import rename_call
from cluster.errors import Cancelled, DeadlineExceeded, GenerationError
from cluster.generation.choice import Choice
from cluster.generation.metadata import Trailers, request_id_of, status_message
from cluster.generation.options import text_options
from cluster.generation.prompt import Prompt, PromptReader
from cluster.generation.tokens import TokenService
from cluster.generation.workers import worker_info, worker_load
from cluster.text.chat_template import ChatTemplate
from cluster.text_generator import TextGenerator
from cluster.text_request import PlannedText, TextRequest
from tandem.v1 import generation_pb2, generation_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

_log = logging.getLogger(__name__)


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """Serves `tandem.v1.Generation`.

    Args:
        clock: monotonic seconds, for the uptime.
        chat_template: the model's; None: it has none.
    """

    def __init__(
        self,
        text: TextGenerator,
        *,
        version: str,
        clock: Callable[[], float],
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._text = text
        self._version = version
        self._clock = clock
        self._start_time = clock()
        self._prompts = PromptReader(text, chat_template)
        self._tokens = TokenService(text, self._prompts)
        self._active: dict[str, asyncio.Task[Any]] = {}
        self._aborted: set[str] = set()

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Context) -> None:
        """Continues a prompt.

        It writes instead of yielding: so all of it is one task, and whatever cancels that closes the sequences.
        """
        async with _answering(context, request.request_id) as (call, trailers):
            request_id = request_id_of(request.request_id, call, in_flight=self._active)
            with self._abortable(request_id):
                timeout_s = context.time_remaining()
                if timeout_s is not None and timeout_s <= 0:
                    # Nothing is wrong with the request: it waited for its turn here until its time was up.
                    raise DeadlineExceeded("the call's deadline passed before it began")
                prompt = self._prompts.read(request)
                planned = await self._plan(prompt, request, request_id, timeout_s)
                choices = self._choices(prompt, request, planned)
                async with aclosing(self._text.run([planned])) as deltas:
                    async for delta in deltas:
                        trailers.add(delta)
                        for response in choices[delta.index].responses(delta):
                            await context.write(response)

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        """Ends calls in flight by their request ids; unknown ids are passed over."""
        async with _answering(context):
            num_aborted = 0
            for request_id in request.request_ids:
                task = self._active.get(request_id)
                if task is not None and request_id not in self._aborted:
                    self._aborted.add(request_id)
                    task.cancel()
                    num_aborted += 1
            return generation_pb2.AbortResponse(num_aborted=num_aborted)

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        """What a text or a conversation is to the model."""
        async with _answering(context):
            return await self._tokens.tokenize(request)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        """What token ids say."""
        async with _answering(context):
            return await self._tokens.detokenize(request)

    async def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: Context
    ) -> generation_pb2.GetModelInfoResponse:
        """What is served."""
        async with _answering(context):
            model = self._text.model
            return generation_pb2.GetModelInfoResponse(
                model_path=model.model_path,
                served_model_name=model.served_model_name,
                max_context_length=model.max_model_len,
                vocab_size=model.vocab_size,
                eos_token_ids=sorted(self._text.tokenizer.eos_token_ids),
                dtype=model.dtype,
                block_size=model.block_size,
                has_chat_template=self._prompts.has_chat_template,
            )

    async def GetServerInfo(
        self, request: generation_pb2.GetServerInfoRequest, context: Context
    ) -> generation_pb2.GetServerInfoResponse:
        """Who serves it."""
        async with _answering(context):
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
        async with _answering(context):
            workers = self._text.generator.workers()
            return generation_pb2.GetLoadsResponse(
                loads=[load for worker in workers if (load := worker_load(worker)) is not None]
            )

    @contextmanager
    def _abortable(self, request_id: str) -> Iterator[None]:
        """`Abort` ends the block with `Cancelled`."""
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._active[request_id] = task
        try:
            yield
        except asyncio.CancelledError as exc:
            if request_id not in self._aborted:
                raise  # the client left, or its deadline passed
            task.uncancel()
            raise Cancelled(f"request {request_id} was aborted") from exc
        finally:
            del self._active[request_id]
            self._aborted.discard(request_id)

    async def _plan(
        self, prompt: Prompt, request: generation_pb2.GenerateRequest, request_id: str, timeout_s: float | None
    ) -> PlannedText:
        return await self._text.plan(
            TextRequest(
                request_id=request_id,
                prompt=prompt.text,
                options=text_options(request, prompt, timeout_s),
                add_special_tokens=prompt.add_special_tokens,
                prompt_field=prompt.name,
            )
        )

    def _choices(self, prompt: Prompt, request: generation_pb2.GenerateRequest, planned: PlannedText) -> list[Choice]:
        return [
            Choice(
                planned,
                index,
                stream=request.stream,
                return_prompt_token_ids=request.return_prompt_token_ids,
                mode=prompt.tool_use.mode,
                calls=self._prompts.call_parser(prompt.tool_use),
            )
            for index in range(planned.options.n)
        ]


@asynccontextmanager
async def _answering(context: Context, own_id: str = "") -> AsyncIterator[tuple[CallContext, Trailers]]:
    """What every call has: its id, its trailers, and errors as statuses.

    Args:
        own_id: the message's, which names the call if its metadata do not.
    """
    call = call_context((*(context.invocation_metadata() or ()), (REQUEST_ID, own_id)))
    rename_call(call)
    trailers = Trailers(call.request_id)
    try:
        yield call, trailers
    except GenerationError as exc:
        await context.abort(exc.grpc_code, status_message(exc), trailers.metadata(exc))
    except Exception:
        if context.done():
            raise  # nobody is there to be told: what was written last had no reader
        _log.exception("a call has failed", extra={"request_id": call.request_id})
        await context.abort(grpc.StatusCode.INTERNAL, "internal error", trailers.metadata())
    context.set_trailing_metadata(trailers.metadata())

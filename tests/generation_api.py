"""`tandem.v1.Generation` over a fake generator and a real socket, and what tests ask of it."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

from cluster.service import GenerationService
from cluster.text.chat_template import ChatTemplate
from fake_generator import FakeGenerator
from gateway_api import Api, embedded_tokenizer, ticking_clock
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import generation_pb2_grpc, sampling_pb2

CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


@dataclass
class Served:
    """A server, and a client of it."""

    address: str
    stub: Any
    generator: FakeGenerator


def embedded_template() -> ChatTemplate:
    tokenizer = embedded_tokenizer()
    assert tokenizer.chat_template is not None
    return ChatTemplate(tokenizer.chat_template, tokenizer.special.names)


@asynccontextmanager
async def serving(
    generator: FakeGenerator | None = None,
    *,
    template: ChatTemplate | None = None,
    max_message_bytes: int = 64 * 2**20,
    interceptors: Sequence[Any] = (),
) -> AsyncIterator[Served]:
    """A server as the gateway opens it, but for its interceptors: those are given."""
    api = Api(generator)
    server = grpc.aio.server(
        interceptors=interceptors, options=(("grpc.max_receive_message_length", max_message_bytes),)
    )
    service = GenerationService(api.text, version="1.2.3", clock=ticking_clock(), chat_template=template)
    generation_pb2_grpc.add_GenerationServicer_to_server(service, server)
    reflection.enable_server_reflection(("tandem.v1.Generation", reflection.SERVICE_NAME), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            yield Served(address, generation_pb2_grpc.GenerationStub(channel), api.generator)
    finally:
        await server.stop(None)


def asking(text: str = "Hi", *, stream: bool = True, **params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="r1", text=text, stream=stream, sampling_params=sampling_pb2.SamplingParams(**params)
    )


def chatting(*messages: pb.ChatMessage, stream: bool = True, max_tokens: int = 20, **chat: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        chat=pb.ChatInput(messages=messages or [pb.ChatMessage(role="user", content="Hi")], **chat),
        stream=stream,
        sampling_params=sampling_pb2.SamplingParams(max_tokens=max_tokens),
    )


def joined(responses: Iterable[pb.GenerateResponse], index: int = 0) -> pb.GenerateComplete:
    """All chunks of a choice as its complete message, but for how it ended: that no chunk says."""
    whole = pb.GenerateComplete(index=index)
    for response in responses:
        if not response.HasField("chunk") or response.chunk.index != index:
            continue
        chunk = response.chunk
        whole.output_ids.extend(chunk.token_ids)
        whole.text += chunk.text
        whole.logprobs.extend(chunk.logprobs)
        whole.prompt_token_ids.extend(chunk.prompt_token_ids)
        if chunk.HasField("prompt_logprobs"):
            assert not whole.HasField("prompt_logprobs"), "told twice"
            whole.prompt_logprobs.CopyFrom(chunk.prompt_logprobs)
        for piece in chunk.tool_calls:
            assert piece.index <= len(whole.tool_calls), f"call {piece.index} begins before the one before it"
            if piece.index == len(whole.tool_calls):
                assert piece.HasField("id"), "a call begins with its id"
                assert piece.HasField("name"), "a call begins with its name"
                whole.tool_calls.add(id=piece.id, name=piece.name)
            whole.tool_calls[piece.index].arguments += piece.arguments
        # They count from the choice's beginning.
        whole.prompt_tokens, whole.completion_tokens = chunk.prompt_tokens, chunk.completion_tokens
        whole.cached_tokens = chunk.cached_tokens
    return whole


def completes(responses: Iterable[pb.GenerateResponse]) -> dict[int, pb.GenerateComplete]:
    """The complete messages by index; each comes once, and after its choice's last chunk."""
    found: dict[int, pb.GenerateComplete] = {}
    for response in responses:
        if response.HasField("complete"):
            assert response.complete.index not in found, "a choice has ended twice"
            found[response.complete.index] = response.complete
        else:
            assert response.chunk.index not in found, "a chunk comes after its choice's end"
    return found


def check_joined(responses: Iterable[pb.GenerateResponse]) -> dict[int, pb.GenerateComplete]:
    """The complete messages by index; each must be what its chunks are together."""
    responses = list(responses)
    found = completes(responses)
    for index, complete in found.items():
        expected = pb.GenerateComplete()
        expected.CopyFrom(complete)
        expected.ClearField("finish_reason")
        expected.ClearField("matched_stop")
        if any(response.chunk.index == index for response in responses if response.HasField("chunk")):
            assert joined(responses, index) == expected
        else:
            assert (expected.text, len(expected.output_ids), len(expected.tool_calls)) == ("", 0, 0)
    return found

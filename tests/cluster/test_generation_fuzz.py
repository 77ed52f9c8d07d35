"""Any message that a client can send is served or refused: nothing is our fault, and streamed is unstreamed."""

import math
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from fake_generator import FakeGenerator, served_model
from gateway_api import embedded_tokenizer
from generation_api import asking, check_joined, embedded_template, serving
from tandem.v1 import generation_pb2 as pb

# Of each kind: small ones, and those at the edges.
NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: (0, 1, 5, -1, -(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, 5, -1, -(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 3, 20, 300, 49151, 49152, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: (0.0, 0.5, 1.0, 1.5, -1.0, 1e-45, 3e38, math.inf, -math.inf, math.nan),
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
}
STRINGS = (
    "", "a", "Hi", "fake", "user", "assistant", "tool", "system", "auto", "none", "required", "weather", "c1",
    "<|im_end|>", "👩‍🚀 大阪", "\x00", "\u2028", " " * 200, "x" * 2000,
    "{}", "[]", "null", "1e999", '{"type": "object"}', '{"type": 3}', '{"a": NaN}', "{" * 2000, '{"messages": 1}',
)  # fmt: skip
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def value(field: FieldDescriptor, draw: random.Random) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return draw.choice(STRINGS)
    return draw.choice(NUMBERS[field.cpp_type])


def fill(message: Message, draw: random.Random, depth: int = 0) -> None:
    """Sets some fields to anything."""
    for field in message.DESCRIPTOR.fields:
        if draw.random() < 0.7:
            continue
        here = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, bias = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            here[value(key, draw)] = value(bias, draw)
        elif field.message_type is not None:
            for _ in range(draw.randint(1, 3) if field.is_repeated else 1):
                inner = here.add() if field.is_repeated else here
                inner.SetInParent()
                if depth < 4:
                    fill(inner, draw, depth + 1)
        elif field.is_repeated:
            here.extend(value(field, draw) for _ in range(draw.randint(0, 3)))
        else:
            setattr(message, field.name, value(field, draw))


def requests(kind: type[Message], draw: random.Random, number: int) -> Iterator[Any]:
    for _ in range(number):
        request = kind()
        fill(request, draw)
        if isinstance(request, pb.GenerateRequest | pb.TokenizeRequest):
            # Most have the beginnings of something that makes sense.
            match draw.randint(0, 3):
                case 0:
                    request.text = draw.choice(("Hi", "👩‍🚀 大阪"))
                case 1:
                    request.chat.messages.add(role="user", content=draw.choice(STRINGS))
            if draw.random() < 0.8:
                request.ClearField("model")
        if isinstance(request, pb.GenerateRequest) and draw.random() < 0.5:
            request.ClearField("sampling_params")
        yield request


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_asked_is_served_or_refused(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(seed)
    codes: dict[grpc.StatusCode, int] = {}
    async with serving(FakeGenerator(served_model(max_model_len=120)), template=embedded_template()) as served:
        for request in requests(pb.GenerateRequest, draw, 300):
            call = served.stub.Generate(request)
            responses = []
            with suppress(grpc.aio.AioRpcError):
                async for response in call:
                    responses.append(response)
            code = await call.code()
            assert code in ALLOWED, f"{code} {await call.details()}\n{request}"
            if code is grpc.StatusCode.OK and request.stream:
                check_joined(responses)
            elif code is not grpc.StatusCode.OK:
                assert await call.details()
            assert dict(await call.trailing_metadata())["x-request-id"]
            codes[code] = codes.get(code, 0) + 1
        for kind, method in (
            (pb.TokenizeRequest, served.stub.Tokenize),
            (pb.DetokenizeRequest, served.stub.Detokenize),
            (pb.AbortRequest, served.stub.Abort),
        ):
            for request in requests(kind, draw, 60):
                call = method(request)
                code = await call.code()
                assert code in ALLOWED, f"{code} {await call.details()}\n{request}"
        assert served.generator.stats.num_active == 0
    assert codes[grpc.StatusCode.OK] > 30
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > 30
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("seed", range(40))
async def test_streamed_pieces_are_the_unstreamed_whole_whatever_ends_the_text(seed: int) -> None:
    draw = random.Random(seed)
    tokenizer = embedded_tokenizer()
    text = "".join(
        draw.choice(("a", "b", "ab", " the", "\n", "č", "大", "🍜", "👩‍🚀", " <tool_call>")) for _ in range(30)
    )
    script = [*tokenizer.encode(text), draw.choice((2, 5))]
    begins = [draw.randrange(len(text)) for _ in range(draw.randint(0, 3))]
    params = {
        "n": draw.randint(1, 3),
        "max_tokens": draw.randint(1, len(script) + 2),
        "stop": [text[begin : begin + draw.randint(1, 6)] for begin in begins],
        "stop_token_ids": draw.choice(([], [5])),
        "include_stop_str_in_output": draw.random() < 0.5,
        "skip_special_tokens": draw.random() < 0.5,
        "logprobs": draw.randint(0, 2),
        "prompt_logprobs": draw.randint(0, 2),
    }
    generator = FakeGenerator(script=lambda request: script, tokens_per_chunk=draw.randint(1, 4))
    async with serving(generator) as served:
        request = asking(**params)
        streamed = check_joined([response async for response in served.stub.Generate(request)])
        request.stream = False
        unstreamed = {r.complete.index: r.complete async for r in served.stub.Generate(request)}
    assert streamed == unstreamed
    assert set(streamed) == set(range(params["n"]))
    for whole in streamed.values():
        assert len(whole.logprobs) == whole.completion_tokens == len(whole.output_ids)

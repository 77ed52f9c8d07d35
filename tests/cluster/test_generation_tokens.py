"""Tokenize and Detokenize."""

from typing import Any

import grpc
import pytest

from fake_generator import FakeGenerator, served_model
from gateway_api import Api, embedded_tokenizer
from generation_api import embedded_template, serving
from tandem.v1 import generation_pb2 as pb

TEXT = "Příliš žluťoučký 🍜 kůň 大阪"


async def test_tokens_are_those_of_http() -> None:
    api = Api()
    http = (await api.post("/tokenize", {"prompt": TEXT, "return_token_strs": True})).json()
    async with serving() as served:
        reply = await served.stub.Tokenize(pb.TokenizeRequest(text=TEXT, return_token_strs=True))
        plain = await served.stub.Tokenize(pb.TokenizeRequest(text=TEXT, model="fake"))
        back = await served.stub.Detokenize(pb.DetokenizeRequest(tokens=reply.tokens))
    assert (list(reply.tokens), list(reply.token_strs)) == (http["tokens"], http["token_strs"])
    assert (reply.count, reply.max_model_len) == (http["count"], http["max_model_len"])
    assert list(plain.tokens) == http["tokens"]
    assert not plain.token_strs
    assert back.text == TEXT


async def test_special_tokens_are_added_as_asked() -> None:
    async with serving(template=embedded_template()) as served:
        for given in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            reply = await served.stub.Tokenize(pb.TokenizeRequest(text="a", **given))
            expected = embedded_tokenizer().encode("a", add_special_tokens=given.get("add_special_tokens", True))
            assert list(reply.tokens) == expected
            request = pb.GenerateRequest(text="a", **given)
            request.sampling_params.max_tokens = 1
            _ = [response async for response in served.stub.Generate(request)]
            assert list(served.generator.requests[-1].prompt_token_ids) == expected


async def test_detokenized_text_has_special_tokens_and_only_whole_characters() -> None:
    async with serving() as served:
        special = await served.stub.Detokenize(pb.DetokenizeRequest(tokens=[1, 2]))
        half = await served.stub.Detokenize(pb.DetokenizeRequest(tokens=[10813, 235]))
        nothing = await served.stub.Detokenize(pb.DetokenizeRequest())
    assert special.text == "<|im_start|><|im_end|>"
    assert half.text == embedded_tokenizer().decode([10813, 235]) != ""
    assert nothing.text == ""


@pytest.mark.parametrize(
    ("method", "request_", "code", "words"),
    [
        (
            "Tokenize",
            pb.TokenizeRequest(),
            grpc.StatusCode.INVALID_ARGUMENT,
            "input is missing: give one of text, chat",
        ),
        ("Tokenize", pb.TokenizeRequest(text="a", model="x"), grpc.StatusCode.NOT_FOUND, "'x'"),
        ("Tokenize", pb.TokenizeRequest(text="a" * 100_000), grpc.StatusCode.INVALID_ARGUMENT, "text"),
        ("Tokenize", pb.TokenizeRequest(chat=pb.ChatInput()), grpc.StatusCode.INVALID_ARGUMENT, "chat"),
        ("Detokenize", pb.DetokenizeRequest(model="x"), grpc.StatusCode.NOT_FOUND, "'x'"),
        ("Detokenize", pb.DetokenizeRequest(tokens=[1, 49152]), grpc.StatusCode.INVALID_ARGUMENT, "49152"),
        ("Detokenize", pb.DetokenizeRequest(tokens=[2**32 - 1]), grpc.StatusCode.INVALID_ARGUMENT, "4294967295"),
        ("Detokenize", pb.DetokenizeRequest(tokens=[1] * 101), grpc.StatusCode.INVALID_ARGUMENT, "101 ids"),
    ],
)
async def test_what_cannot_be_has_its_status(method: str, request_: Any, code: grpc.StatusCode, words: str) -> None:
    async with serving(FakeGenerator(served_model(max_model_len=100))) as served:
        call = getattr(served.stub, method)(request_)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        trailers = dict(await call.trailing_metadata())
    assert caught.value.code() is code
    assert words in caught.value.details()
    assert trailers["x-request-id"]

"""Token ids to text, alike at both front doors."""

import threading
from collections.abc import Iterable

import grpc
import pytest

from cluster.detokenize import detokenize
from cluster.errors import InvalidRequest
from engine.tokenizer.tokenizer import Tokenizer
from fake_generator import FakeGenerator, served_model
from gateway_api import Api, embedded_tokenizer, error_of
from generation_api import serving
from tandem.v1 import generation_pb2 as pb


class Watched(Tokenizer):
    """The embedded one, which notes the threads it decodes in."""

    def __init__(self) -> None:
        tokenizer = embedded_tokenizer()
        super().__init__(tokenizer._encoder, tokenizer.special, tokenizer.chat_template)
        self.threads: list[threading.Thread] = []

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        self.threads.append(threading.current_thread())
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("token_ids", [[], [1, 2], [10813, 235], list(range(8192))], ids=len)
async def test_tokens_are_decoded_in_a_thread(token_ids: list[int]) -> None:
    tokenizer = Watched()
    text = await detokenize(Api(tokenizer=tokenizer).text, token_ids)
    assert text == embedded_tokenizer().decode(token_ids, skip_special_tokens=False)
    assert len(tokenizer.threads) == 1
    assert threading.current_thread() not in tokenizer.threads


@pytest.mark.parametrize("token_ids", [[49152], [1, 2**32 - 1], [1] * 101], ids=len)
async def test_both_doors_refuse_the_same_in_the_same_words(token_ids: list[int]) -> None:
    generator = FakeGenerator(served_model(max_model_len=100))
    tokenizer = Watched()
    api = Api(generator, tokenizer)
    with pytest.raises(InvalidRequest) as refused:
        await detokenize(api.text, token_ids)
    error = error_of(await api.post("/detokenize", {"tokens": token_ids}), 400)
    assert (error["message"], error["param"]) == (refused.value.message, "tokens")
    async with serving(generator) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Detokenize(pb.DetokenizeRequest(tokens=token_ids))
    assert caught.value.details() == refused.value.message
    assert tokenizer.threads == []


async def test_no_token_has_a_negative_id() -> None:
    with pytest.raises(InvalidRequest, match=r"the id -1; the model's ids are 0 to 49151"):
        await detokenize(Api().text, [5, -1])

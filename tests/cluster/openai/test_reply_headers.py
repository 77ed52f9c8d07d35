"""Headers of a reply: who served it, what was cached, and where the time went."""

import pytest

from cluster.generator import StageTimes
from cluster.openai.reply_headers import reply_headers
from cluster.text_generator import TextDelta
from fake_generator import FakeGenerator
from gateway_api import Api


def delta(stages: StageTimes | None = None, *, worker: str | None = "d") -> TextDelta:
    return TextDelta(index=0, text="", tokens=(), prefill_worker=worker, decode_worker=worker, stages=stages)


@pytest.mark.parametrize("stream", [False, True])
async def test_reply_tells_its_workers_and_cached_tokens(stream: bool) -> None:
    api = Api(FakeGenerator(num_cached_tokens=3))
    for reply in (
        await api.complete("Once upon a time", max_tokens=2, n=2, stream=stream),
        await api.chat("Once upon a time", max_tokens=2, stream=stream),
    ):
        assert reply.headers["x-tandem-prefill-worker"] == "prefill-0"
        assert reply.headers["x-tandem-decode-worker"] == "decode-0"
        assert reply.headers["x-tandem-cached-tokens"] == "3"
        assert "server-timing" not in reply.headers, "the workers have not said"


async def test_cached_tokens_of_several_prompts_are_added() -> None:
    reply = await Api(FakeGenerator(num_cached_tokens=3)).complete(["Once upon", "a time ago"], max_tokens=1)
    assert reply.headers["x-tandem-cached-tokens"] == "6"
    assert reply.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


def test_stages_are_told_in_milliseconds() -> None:
    headers = reply_headers(delta(StageTimes(queued=0.001, prefill=0.25, transfer=0.0, decode=1.5)), 0)
    assert headers["server-timing"] == (
        "queued;dur=1.000, prefill;dur=250.000, transfer;dur=0.000, decode;dur=1500.000"
    )


def test_what_no_worker_served_tells_of_none() -> None:
    assert reply_headers(delta(worker=None), 0) == {}

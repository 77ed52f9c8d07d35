"""Log-probabilities: OpenAI's two forms, streamed and not, and nothing that is not JSON."""

import json
import math
from typing import Any

import pytest

from cluster.openai.logprobs import CompletionLogprobs, chat_logprobs
from engine.executor import SampledToken
from gateway_api import Api, embedded_tokenizer, error_of, events, says


@pytest.mark.parametrize("num_top", [0, 3])
async def test_chat_tells_every_token_with_its_bytes(num_top: int) -> None:
    api = Api(says("héllo 🍜"))
    choice = (await api.chat("Hi", max_tokens=20, logprobs=True, top_logprobs=num_top)).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    data = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert data.decode() == choice["message"]["content"] + "<|im_end|>"
    for entry in entries:
        assert entry["logprob"] <= 0
        top = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(top) == num_top
        assert top == sorted(top, reverse=True)


async def test_chat_lists_no_alternatives_when_none_are_asked_for() -> None:
    body = (await Api().chat("Hi", max_tokens=3, logprobs=True)).json()
    assert [entry["top_logprobs"] for entry in body["choices"][0]["logprobs"]["content"]] == [[], [], []]


async def test_chat_stream_tells_the_same_as_the_whole() -> None:
    api = Api(says("one two three four"))
    fields: dict[str, Any] = {"max_tokens": 9, "logprobs": True, "top_logprobs": 2, "stop": ["four!"]}
    whole = (await api.chat("Hi", **fields)).json()["choices"][0]["logprobs"]["content"]
    chunks = events(await api.chat("Hi", stream=True, **fields))
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == whole


@pytest.mark.parametrize("num_top", [0, 2, 5])
async def test_completion_has_four_lists_of_one_length(num_top: int) -> None:
    body = (await Api().complete("Once", max_tokens=5, logprobs=num_top, seed=1)).json()
    choice = body["choices"][0]
    lists = choice["logprobs"]
    assert {len(values) for values in lists.values()} == {5}
    assert "".join(lists["tokens"]) == choice["text"]
    assert all(1 <= len(top) <= num_top + 1 for top in lists["top_logprobs"])
    assert all(token in top for token, top in zip(lists["tokens"], lists["top_logprobs"], strict=True))
    for token, start in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert choice["text"][start : start + len(token)] == token


async def test_completion_stream_tells_the_same_as_the_whole() -> None:
    api = Api(says("one 🍜 two"))
    fields: dict[str, Any] = {"max_tokens": 9, "logprobs": 1}
    whole = (await api.complete("Once", **fields)).json()["choices"][0]["logprobs"]
    chunks = events(await api.complete("Once", stream=True, **fields))
    for name, values in whole.items():
        assert [value for chunk in chunks for value in chunk["choices"][0]["logprobs"][name]] == values


def test_offset_of_a_part_of_a_character_is_where_the_character_will_stand() -> None:
    tokenizer = embedded_tokenizer()
    tokens = [SampledToken(token_id, -1.0) for token_id in tokenizer.encode("a🍜b")]
    lists = CompletionLogprobs(tokenizer, 0, offset=10, skip_special_tokens=True)
    told = [lists.push([token]) for token in tokens]
    assert [each["text_offset"][0] for each in told] == [10, 11, 11, 11, 12]
    assert told[1]["tokens"] == ["bytes:\\xf0\\x9f"]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, None, -1e30])
def test_what_json_cannot_say_is_told_as_impossible(logprob: float | None) -> None:
    token = SampledToken(40, logprob, ((40, -math.inf), (41, math.nan)))
    tokenizer = embedded_tokenizer()
    told = [
        chat_logprobs(tokenizer, [token], 2),
        CompletionLogprobs(tokenizer, 2, offset=0, skip_special_tokens=True).push([token]),
    ]
    text = json.dumps(told, allow_nan=False)
    assert text.count("-9999.0") >= 5


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": -5},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": False, "top_logprobs": 3},
        {"top_logprobs": 3},
        {"logprobs": 3},
    ],
)
async def test_chat_refuses_what_the_schema_does_not_have(fields: dict[str, Any]) -> None:
    assert error_of(await Api().chat("Hi", max_tokens=1, **fields), 400)["param"] in ("top_logprobs", "logprobs")


@pytest.mark.parametrize("logprobs", [-2, 6, True, "3", 1.5])
async def test_completion_refuses_what_the_schema_does_not_have(logprobs: Any) -> None:
    assert error_of(await Api().complete("Hi", max_tokens=1, logprobs=logprobs), 400)["param"] == "logprobs"


async def test_log_probabilities_of_the_prompt_are_refused_clearly() -> None:
    api = Api()
    error = error_of(await api.complete("Hi", echo=True, logprobs=1), 400)
    assert error["param"] == "logprobs"
    assert "echo" in error["message"]
    assert api.generator.requests == []

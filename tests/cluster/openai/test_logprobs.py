"""Log-probabilities: OpenAI's two forms, streamed and not, and nothing that is not JSON."""

import json
import math
from typing import Any

import pytest

from cluster.openai.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from cluster.openai.prompt_offsets import prompt_offsets
from engine.executor import SampledToken
from gateway_api import Api, embedded_tokenizer, error_of, events, says, streamed_text


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


def joined(chunks: list[dict[str, Any]], name: str) -> list[Any]:
    """One of the four lists of a streamed completion."""
    return [value for chunk in chunks for choice in chunk["choices"] for value in choice["logprobs"][name]]


PROMPTS = ["Hello world, this", "é🍜<|im_start|>user\nx", "x", [19556, 905, 28], [240, 1, 17, 240, 159]]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_echoed_prompt_has_its_log_probabilities_before_the_generated_ones(prompt: Any, max_tokens: int) -> None:
    api, tokenizer = Api(), embedded_tokenizer()
    fields: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": 2, "echo": True, "temperature": 0}
    body = (await api.complete(prompt, **fields)).json()
    choice = body["choices"][0]
    lists = choice["logprobs"]
    prompt_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    shown = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
    assert choice["text"].startswith(shown)
    assert {len(values) for values in lists.values()} == {len(prompt_ids) + max_tokens}
    assert (lists["token_logprobs"][0], lists["top_logprobs"][0], lists["text_offset"][0]) == (None, None, 0)
    assert all(isinstance(value, float) for value in lists["token_logprobs"][1:])
    assert all(token in top for token, top in zip(lists["tokens"][1:], lists["top_logprobs"][1:], strict=True))
    assert lists["text_offset"] == sorted(lists["text_offset"])
    assert lists["text_offset"][len(prompt_ids) :][:1] == [len(shown)][:max_tokens]
    assert body["usage"]["completion_tokens"] == max_tokens
    if max_tokens == 0:
        assert (choice["text"], choice["finish_reason"]) == (shown, "length")
    chunks = events(await api.complete(prompt, stream=True, **fields))
    assert {name: joined(chunks, name) for name in lists} == lists
    assert streamed_text(chunks) == choice["text"]
    assert len(chunks[0]["choices"][0]["logprobs"]["tokens"]) >= len(prompt_ids)


async def test_tokens_of_an_echoed_text_stand_where_their_offsets_say() -> None:
    prompt = "Hello <|im_start|>wörld, 10 🍜s"
    choice = (await Api().complete(prompt, max_tokens=2, logprobs=0, echo=True)).json()["choices"][0]
    for token, at in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][at : at + len(token)] == token


async def test_offsets_of_every_choice_begin_anew() -> None:
    body = (await Api().complete(["Hello world", "Hi"], n=2, max_tokens=1, logprobs=0, echo=True)).json()
    offsets = [choice["logprobs"]["text_offset"] for choice in body["choices"]]
    assert offsets == [[0, 5, 11], [0, 5, 11], [0, 2], [0, 2]]


def test_special_token_that_was_put_before_the_prompt_takes_no_room_in_it() -> None:
    tokenizer = embedded_tokenizer()
    ids = tokenizer.encode("Hi there")
    assert prompt_offsets(tokenizer, [1, *ids], "Hi there") == [0, 0, 2]
    assert prompt_offsets(tokenizer, [1, *ids], "<|im_start|>Hi there") == [0, 12, 14]


def test_space_that_sentencepiece_puts_before_a_text_takes_no_room_in_it() -> None:
    tokenizer = embedded_tokenizer()
    ids = tokenizer.encode(" Hello there")
    assert prompt_offsets(tokenizer, ids, "Hello there") == [0, 5]
    assert prompt_offsets(tokenizer, ids, " Hello there") == [0, 6]


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
async def test_log_probabilities_of_the_prompt_alone_are_vllms(is_chat: bool) -> None:
    api, tokenizer = Api(), embedded_tokenizer()
    send = api.chat if is_chat else api.complete
    choice = (await send("Hello world, this", max_tokens=2, prompt_logprobs=2)).json()["choices"][0]
    ids = api.generator.requests[0].prompt_token_ids
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(ids) - 1
    for token_id, entries in zip(ids[1:], others, strict=True):
        own = entries[str(token_id)]
        assert own["decoded_token"] == tokenizer.token_text(token_id)
        assert own["rank"] == 1, "the fake model's best is the token itself"
        assert sorted(entry["rank"] for entry in entries.values()) == [1, 2]
        assert all(entry["logprob"] <= 0 for entry in entries.values())
    assert choice["logprobs"] is None
    chunks = events(await send("Hello world, this", max_tokens=2, prompt_logprobs=2, stream=True))
    told = [c["prompt_logprobs"] for chunk in chunks for c in chunk["choices"] if "prompt_logprobs" in c]
    assert told == [choice["prompt_logprobs"]]


def test_rank_of_a_token_that_is_not_among_the_best_is_not_known() -> None:
    told = prompt_logprobs(embedded_tokenizer(), [5, 40], [SampledToken(40, -9.0, ((41, -0.1), (42, -math.inf)))], 2)
    assert told == [
        None,
        {
            "41": {"logprob": -0.1, "rank": 1, "decoded_token": embedded_tokenizer().token_text(41)},
            "42": {"logprob": -9999.0, "rank": 2, "decoded_token": embedded_tokenizer().token_text(42)},
            "40": {"logprob": -9.0, "rank": None, "decoded_token": embedded_tokenizer().token_text(40)},
        },
    ]


async def test_more_of_the_prompts_log_probabilities_serve_both_who_ask() -> None:
    api = Api()
    choice = (await api.complete("Hello world", max_tokens=1, logprobs=1, echo=True, prompt_logprobs=4)).json()[
        "choices"
    ][0]
    assert api.generator.requests[0].params.prompt_logprobs == 4
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    assert all(len(entries) in (4, 5) for entries in choice["prompt_logprobs"][1:])


async def test_prompt_has_none_where_nobody_asks() -> None:
    api = Api()
    for fields in ({"logprobs": 1}, {"echo": True}, {}):
        assert "prompt_logprobs" not in (await api.complete("Hi", max_tokens=1, **fields)).json()["choices"][0]
    assert all(request.params.prompt_logprobs is None for request in api.generator.requests)


@pytest.mark.parametrize("value", [-1, 21, True, "3"])
async def test_number_of_the_prompts_log_probabilities_has_bounds(value: Any) -> None:
    for send in (Api().chat, Api().complete):
        assert error_of(await send("Hi", prompt_logprobs=value), 400)["param"] == "prompt_logprobs"


async def test_tokens_are_told_by_number_when_they_are_asked_for_so() -> None:
    fields: dict[str, Any] = {"max_tokens": 1, "return_tokens_as_token_ids": True}
    choice = (await Api(says("x")).complete("Hi", logprobs=1, **fields)).json()["choices"][0]
    number = embedded_tokenizer().encode("x")[0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{number}"]
    choice = (await Api(says("x")).chat("Hi", logprobs=True, **fields)).json()["choices"][0]
    assert choice["logprobs"]["content"][0]["token"] == f"token_id:{number}"

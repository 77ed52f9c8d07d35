"""A reply is the same however its request got its KV: prefilled apart, on the decode worker, out of a warm cache, or
computed again in a pool just above one context. Streamed, it is the same reply in pieces.

The requests are such as other servers were reported to fail on, in their smallest form: stop strings across tokens,
characters across chunks, prompts that end with a block, one token after a hand-off, choices, seeds, log-probabilities.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from engine.kvcache.slots import num_blocks_for
from gateway_thread import Endpoint, in_thread
from served import served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CONTEXT = 256
WISE = 9357  # the token that the story goes on with
SMALL_POOL = "just above one context"
STORY = "Once upon a time, in a small village by the sea, there lived a"
STOP = "d woman na"  # begins and ends within tokens of what the model goes on with
EMOJI = "🍜🍣🍱🍜🍣🍱🍜🍣🍱🍜🍣"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = [{"role": "user", "content": "Weather in Rome?"}]

TEXT: dict[str, dict[str, Any]] = {
    "plain": {"prompt": STORY, "max_tokens": 48},
    "one token": {"prompt": STORY, "max_tokens": 1},
    "two tokens": {"prompt": STORY, "max_tokens": 2},
    "stop across tokens": {"prompt": STORY, "max_tokens": 24, "stop": ["☃", STOP]},
    "stop kept": {"prompt": STORY, "max_tokens": 24, "stop": STOP, "include_stop_str_in_output": True},
    "parts of characters": {"prompt": EMOJI, "max_tokens": 24},
    "end in a character": {"prompt": EMOJI, "max_tokens": 3},
    "czech": {"prompt": "Příliš žluťoučký kůň úpěl ďábelské", "max_tokens": 16},
    "echo": {"prompt": STORY, "max_tokens": 8, "echo": True},
    "nothing": {"prompt": STORY, "max_tokens": 0},
    "echo with log-probabilities": {"prompt": STORY, "max_tokens": 4, "echo": True, "logprobs": 2},
    "prompt's log-probabilities": {"prompt": STORY, "max_tokens": 0, "echo": True, "logprobs": 1},
    "choice": {"prompt": STORY, "max_tokens": 16, "guided_choice": ["n old king.", " brave sailor", " wise owl"]},
    "log-probabilities": {"prompt": STORY, "max_tokens": 8, "logprobs": 3},
    "top_p 0": {"prompt": STORY, "max_tokens": 8, "temperature": 1, "top_p": 0},
    "seed": {"prompt": STORY, "max_tokens": 16, "temperature": 1.2, "seed": 1234},
    "choices": {"prompt": STORY, "max_tokens": 12, "n": 4, "temperature": 1, "seed": 7},
    "greedy choices": {"prompt": STORY, "max_tokens": 6, "n": 2},
    "prompts and choices": {"prompt": ["The sky is", STORY], "max_tokens": 6, "n": 2, "temperature": 1, "seed": 3},
    "penalties": {
        "prompt": STORY,
        "max_tokens": 16,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    "bias and min_tokens": {"prompt": STORY, "max_tokens": 12, "min_tokens": 12, "logit_bias": {str(WISE): -100}},
    "whole context": {"prompt": [500 + i % 97 for i in range(CONTEXT - 6)], "max_tokens": 6},
} | {
    f"{length} tokens": {"prompt": [1000 + (length * 31 + i * i * 7) % 40_000 for i in range(length)], "max_tokens": 5}
    for length in (1, 15, 16, 17, 32, 64)
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}
FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "capital",
        "schema": {
            "type": "object",
            "properties": {"city": {"enum": ["London", "Paris", "Rome"]}, "is_port": {"type": "boolean"}},
            "required": ["city", "is_port"],
            "additionalProperties": False,
        },
    },
}
CHAT: dict[str, dict[str, Any]] = {
    "schema": {"messages": QUESTION, "max_tokens": 40, "response_format": FORM},
    "schema and choices": {
        "messages": QUESTION,
        "max_tokens": 40,
        "response_format": FORM,
        "n": 3,
        "temperature": 1.5,
        "seed": 2,
    },
    "tool": {"messages": WEATHER, "max_tokens": 40, "tools": [TOOL], "tool_choice": "required"},
    "chat": {"messages": QUESTION, "max_tokens": 16},
    "chat's log-probabilities": {"messages": QUESTION, "max_tokens": 6, "logprobs": True, "top_logprobs": 2},
    "chat's choices": {"messages": QUESTION, "max_completion_tokens": 8, "n": 3, "temperature": 1.2, "seed": 1},
}
REQUESTS = {name: ("/v1/completions", body) for name, body in TEXT.items()} | {
    name: ("/v1/chat/completions", body) for name, body in CHAT.items()
}

# What a request got the first way it was asked: all others must give the same.
REPLIES: dict[str, list[dict[str, Any]]] = {}


@pytest.fixture(scope="session", params=["apart", "on the decode worker", SMALL_POOL])
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    flags: dict[str, Any] = {"num_blocks": 129}
    match request.param:
        case "apart":
            flags["max_local_prefill_tokens"] = 0
        case "on the decode worker":
            flags["prefill_workers"] = 0
        case _:
            flags["num_blocks"] = num_blocks_for(CONTEXT, 16) + 2  # one is the null block
    with in_thread(partial(served, tmp_path_factory.mktemp("workers"), max_model_len=CONTEXT, **flags)) as endpoint:
        yield endpoint


@pytest.fixture
async def http(way: Endpoint) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=way.http_url, timeout=120, trust_env=False) as client:
        yield client


async def whole(http: httpx.AsyncClient, name: str) -> list[dict[str, Any]]:
    """The choices of a reply in one piece, whose usage is sound."""
    path, body = REQUESTS[name]
    reply = await http.post(path, json={"model": "smollm2-135m-instruct", "temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    choices: list[dict[str, Any]] = reply.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [_without_ids(choice) for choice in choices]


async def streamed(http: httpx.AsyncClient, name: str) -> list[dict[str, Any]]:
    """The choices of a stream, put together."""
    path, body = REQUESTS[name]
    body = {"model": "smollm2-135m-instruct", "temperature": 0, "stream": True, **body}
    choices: dict[int, dict[str, Any]] = {}
    async with http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line and line != "data: [DONE]":
                for piece in json.loads(line.removeprefix("data: "))["choices"]:
                    _add(choices.setdefault(piece["index"], {"index": piece["index"]}), piece)
    return [_without_ids(choices[index]) for index in sorted(choices)]


def _add(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    """Texts and lists go on; of all else the last word counts."""
    assert not choice.get("finish_reason"), "a choice goes on after its end"
    piece = {"message" if key == "delta" else key: value for key, value in piece.items()}
    for key, value in piece.items():
        if key in ("message", "logprobs") and value is not None:
            choice[key] = _joined(choice.get(key) or {}, value)
        elif key == "text":
            choice[key] = choice.get(key, "") + value
        elif value is not None or key not in choice:
            choice[key] = value


def _joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    out = dict(old)
    for key, value in new.items():
        if key == "tool_calls":
            out[key] = calls = list(out.get(key, []))
            for piece in value:
                if piece["index"] == len(calls):
                    calls.append({})
                calls[piece["index"]] = _joined(calls[piece["index"]], {k: v for k, v in piece.items() if k != "index"})
        elif isinstance(value, dict):
            out[key] = _joined(out.get(key, {}), value)
        elif isinstance(value, str | list) and key != "role":
            out[key] = (out.get(key) or type(value)()) + value
        else:
            out.setdefault(key, value)
    return out


def _without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """Calls have ids of their own; and what a stream need not say is said."""
    if (message := choice.get("message")) is not None:
        message.setdefault("refusal", None)
        for call in message.get("tool_calls", ()):
            assert call.pop("id")
    return choice


async def know(http: httpx.AsyncClient, *names: str) -> None:
    """Asks for those replies that no test has got so far."""
    for name in names:
        if name not in REPLIES:
            REPLIES[name] = await whole(http, name)


def texts(name: str) -> list[str]:
    return [choice["text"] if "text" in choice else choice["message"]["content"] or "" for choice in REPLIES[name]]


@pytest.mark.parametrize("name", REQUESTS)
async def test_reply_is_the_same_cold_warm_and_streamed(http: httpx.AsyncClient, name: str) -> None:
    cold = await whole(http, name)
    assert cold == REPLIES.setdefault(name, cold)
    assert await streamed(http, name) == cold
    assert all("\ufffd" not in text.rstrip("\ufffd") for text in texts(name))


async def test_replies_are_what_was_asked_for(http: httpx.AsyncClient) -> None:
    await know(http, *REQUESTS)
    (story,) = texts("plain")
    assert story.startswith(" wise and kind woman named")
    assert story.startswith(texts("two tokens")[0])
    assert texts("one token") == [" wise"]
    assert texts("stop across tokens") == [" wise and kin"]
    assert texts("stop kept") == [" wise and kind woman na"]
    assert {REPLIES[name][0]["finish_reason"] for name in ("stop across tokens", "stop kept")} == {"stop"}
    assert texts("echo")[0].startswith(STORY + " wise and kind woman named")
    assert story.startswith(texts("top_p 0")[0])
    assert [story.startswith(text) for text in texts("greedy choices")] == [True, True]
    assert not texts("bias and min_tokens")[0].startswith(" wise")
    assert len(set(texts("choices"))) == 4
    assert all("🍱" in text for name in ("parts of characters", "end in a character") for text in texts(name))
    assert "Paris" in texts("chat")[0]
    assert texts("nothing") == [""]
    assert texts("prompt's log-probabilities") == [STORY]
    assert texts("choice")[0] in TEXT["choice"]["guided_choice"]
    for text in (*texts("schema"), *texts("schema and choices")):
        assert json.loads(text).keys() == {"city", "is_port"}
    call, *_ = REPLIES["tool"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
    read = REPLIES["echo with log-probabilities"][0]["logprobs"]
    assert read["token_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in read["token_logprobs"][1:])
    assert "".join(read["tokens"]) == texts("echo with log-probabilities")[0]


async def test_replies_are_the_same_all_at_once(http: httpx.AsyncClient, request: pytest.FixtureRequest) -> None:
    await know(http, *REQUESTS)
    names = [*REQUESTS, *["plain"] * 8]
    replies = await asyncio.gather(*(whole(http, name) for name in names))
    assert replies == [REPLIES[name] for name in names]
    if request.node.callspec.params["way"] == SMALL_POOL:
        metrics = (await http.get("/metrics")).text
        preemptions = re.findall(r'^tandem_num_preemptions_total\{.*role="decode".*\} (.+)$', metrics, re.M)
        assert sum(map(float, preemptions)) > 0


async def test_what_was_refused_disturbs_nobody(http: httpx.AsyncClient) -> None:
    await know(http, "plain")
    neighbour = asyncio.create_task(whole(http, "plain"))
    model = {"model": "smollm2-135m-instruct", "max_tokens": 2}
    for prompt in ([10**9], [-1], [2**31], [2**63], [2**70], [[5], [-5]], [1.5], [], [[]], [7] * CONTEXT):
        reply = await http.post("/v1/completions", json={**model, "prompt": prompt})
        assert reply.status_code == 400, prompt
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert await neighbour == REPLIES["plain"]

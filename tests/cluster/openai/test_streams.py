"""A stream, put together, is the unstreamed reply, whatever the text and however it was cut into steps."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_generator import FakeGenerator
from gateway_api import Api, embedded_tokenizer, events, finish_reasons, says, streamed_text

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
FRAGMENTS = [
    "<tool_call>", "</tool_call>", '{"name": "time", ', '"arguments": {"a": "é"}}', "\n", " ", "hello", "🍜", "é",
    "STOP", "ST", "<|im_start|>", "}", '"', '[{"name": "weather", "parameters": {', '}}]', "x" * 20,
]  # fmt: skip

options = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 60)},
    optional={
        "stop": st.sampled_from(["STOP", ["OPhe", "llo"], ["e", '"'], ["</tool"], "🍜", ["\n", "call>\n"]]),
        "n": st.just(2),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "min_tokens": st.integers(0, 1),
        "return_token_ids": st.just(True),
        "stop_token_ids": st.sampled_from([[1], [28]]),
    },
)
chat_options = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.just(TOOLS),
        "tool_choice": st.sampled_from(["auto", "none", "required", TOOLS[0]]),
        "parallel_tool_calls": st.booleans(),
        "logprobs": st.just(True),
    },
)
completion_options = st.fixed_dictionaries(
    {}, optional={"echo": st.booleans(), "logprobs": st.integers(0, 2), "prompt_logprobs": st.just(1)}
)
token_ids = st.lists(
    st.one_of(
        st.sampled_from(FRAGMENTS).map(lambda text: tuple(embedded_tokenizer().encode(text))),
        # Any token: parts of characters, special ones.
        st.integers(0, 400).map(lambda token_id: (token_id,)),
    ),
    max_size=12,
).map(lambda parts: [token_id for part in parts for token_id in part])


def api_of(tokens: list[int], tokens_per_chunk: int) -> Api:
    script = [*tokens, *embedded_tokenizer().eos_token_ids]
    return Api(FakeGenerator(script=lambda request: script, tokens_per_chunk=tokens_per_chunk, num_cached_tokens=2))


def calls_without_ids(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def put_together(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """A streamed choice as one object."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    calls: list[dict[str, Any]] = []
    logprobs: dict[str, list[Any]] = {}
    for choice in choices:
        for call in choice.get("delta", {}).get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        for name, values in (choice["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(values or ())
    (finish_reason,) = finish_reasons(chunks, index)
    return {
        "text": streamed_text(chunks, index),
        "calls": calls_without_ids(calls),
        "finish_reason": finish_reason,
        "stop_reason": choices[-1]["stop_reason"],
        "token_ids": [token_id for choice in choices for token_id in choice.get("token_ids", ())],
        "prompt_token_ids": [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice],
        "prompt_logprobs": [choice["prompt_logprobs"] for choice in choices if "prompt_logprobs" in choice],
        "logprobs": {name: values for name, values in logprobs.items() if values},
    }


def whole(choice: dict[str, Any]) -> dict[str, Any]:
    """An unstreamed choice in the same form."""
    message = choice.get("message", {})
    return {
        "text": choice.get("text", message.get("content") or ""),
        "calls": calls_without_ids(message.get("tool_calls", [])),
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
        "token_ids": choice.get("token_ids", []),
        "prompt_token_ids": [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else [],
        "prompt_logprobs": [choice["prompt_logprobs"]] if "prompt_logprobs" in choice else [],
        "logprobs": {name: values for name, values in (choice["logprobs"] or {}).items() if values},
    }


async def compare(tokens: list[int], tokens_per_chunk: int, fields: dict[str, Any], *, is_chat: bool) -> None:
    api = api_of(tokens, tokens_per_chunk)
    send = api.chat if is_chat else api.complete
    reply = await send("Hi there", **fields)
    if reply.status_code == 400:
        assert (await send("Hi there", stream=True, **fields)).json() == reply.json()
        return
    body = reply.json()
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    other = api_of(tokens, 1)
    *chunks, last = events(await (other.chat if is_chat else other.complete)("Hi there", **fields, **stream))
    assert last["usage"] == body["usage"]
    for choice in body["choices"]:
        assert put_together(chunks, choice["index"]) == whole(choice)
        text = whole(choice)["text"]
        shown = text.removeprefix("Hi there" if fields.get("echo") else "") + "".join(
            arguments for _, arguments in whole(choice)["calls"]
        )
        stops = [fields["stop"]] if isinstance(fields.get("stop"), str) else fields.get("stop", [])
        if not fields.get("include_stop_str_in_output") and not fields.get("min_tokens") and not fields.get("tools"):
            assert not any(stop in shown for stop in stops)


@settings(max_examples=60, deadline=None)
@given(tokens=token_ids, tokens_per_chunk=st.integers(1, 5), fields=options, more=completion_options)
def test_streamed_completion_is_the_unstreamed_one(
    tokens: list[int], tokens_per_chunk: int, fields: dict[str, Any], more: dict[str, Any]
) -> None:
    asyncio.run(compare(tokens, tokens_per_chunk, fields | more, is_chat=False))


@settings(max_examples=60, deadline=None)
@given(tokens=token_ids, tokens_per_chunk=st.integers(1, 5), fields=options, more=chat_options)
def test_streamed_chat_is_the_unstreamed_one(
    tokens: list[int], tokens_per_chunk: int, fields: dict[str, Any], more: dict[str, Any]
) -> None:
    asyncio.run(compare(tokens, tokens_per_chunk, fields | more, is_chat=True))


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
async def test_usage_grows_with_every_chunk_when_it_is_asked_for(is_chat: bool) -> None:
    api = Api(says("one two three four"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    send = api.chat if is_chat else api.complete
    chunks = events(await send("Hi", max_tokens=3, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert set(counts) >= {1, 2, 3}
    assert chunks[-1]["choices"] == []
    only = events(await send("Hi", max_tokens=3, stream=True, stream_options={"continuous_usage_stats": True}))
    assert all("usage" not in chunk for chunk in only)

"""Tools over HTTP: what the model is told, what it is held to, and its calls in both kinds of replies."""

import functools
import json
import re
from typing import Any

import pytest
import tokenizers

from cluster.text.chat_template import ChatTemplate
from engine.structure.spec import StructureKind
from engine.tokenizer.tokenizer import Tokenizer
from fake_generator import FakeGenerator, served_model
from gateway_api import Api, embedded_tokenizer, error_of, events, finish_reasons, says

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TIME = {"type": "function", "function": {"name": "time", "description": "Tells the time."}}
TOOLS = [WEATHER, TIME]
PARIS = '{"city": "Pâris"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
CALL_TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}


def streamed_message(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A choice's message, put together as clients do."""
    message: dict[str, Any] = {"role": None, "content": None, "tool_calls": []}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        message["role"] = message["role"] or delta.get("role")
        if delta.get("content"):
            message["content"] = (message["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", ()):
            calls = message["tool_calls"]
            if call["index"] == len(calls):
                assert set(call) == {"index", "id", "type", "function"}, "a call begins with its head"
                assert call["function"]["arguments"] == ""
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                assert call["index"] == len(calls) - 1
                assert set(call) == {"index", "function"}
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{key: call[key] for key in ("type", "function")} for call in message.get("tool_calls", ())]
    return {"role": message["role"], "content": message["content"] or None, "tool_calls": calls}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, None, [("weather", PARIS)]),
        (f"{CALL}\n{CALL_TIME}", None, [("weather", PARIS), ("time", "{}")]),
        (f"I'll look. {CALL}", "I'll look.", [("weather", PARIS)]),
    ],
)
async def test_calls_are_told_apart_from_words(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    body = (await Api(says(text)).chat("Weather?", tools=TOOLS, max_tokens=200)).json()
    choice = body["choices"][0]
    message = choice["message"]
    assert (message["role"], message["content"], choice["finish_reason"]) == ("assistant", content, "tool_calls")
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == calls
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("call_[0-9a-f]{24}", call_id) for call_id in ids)
    assert all(call["type"] == "function" for call in message["tool_calls"])

    chunks = events(await Api(says(text)).chat("Weather?", tools=TOOLS, max_tokens=200, stream=True))
    assert without_ids(streamed_message(chunks)) == without_ids(message)
    assert finish_reasons(chunks) == ["tool_calls"]


async def test_answer_without_calls_is_an_ordinary_one() -> None:
    choice = (await Api(says("Hello.")).chat("Hi", tools=TOOLS, max_tokens=20)).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_arguments_are_streamed_as_they_come() -> None:
    chunks = events(await Api(says(CALL)).chat("Weather?", tools=TOOLS, max_tokens=200, stream=True))
    pieces = [
        call["function"]["arguments"]
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    assert len([piece for piece in pieces if piece]) > 3
    assert "".join(pieces) == PARIS


async def test_call_that_is_cut_off_ends_for_its_length() -> None:
    length = len(embedded_tokenizer().encode(CALL[: CALL.index("âris")]))
    choice = (await Api(says(CALL)).chat("Weather?", tools=TOOLS, max_tokens=length)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert PARIS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


async def test_choices_have_their_own_calls() -> None:
    chunks = events(await Api(says(CALL)).chat("Weather?", tools=TOOLS, n=2, max_tokens=200, stream=True))
    messages = [streamed_message(chunks, index) for index in range(2)]
    assert without_ids(messages[0]) == without_ids(messages[1])
    assert messages[0]["tool_calls"][0]["id"] != messages[1]["tool_calls"][0]["id"]


async def test_one_call_is_left_when_they_are_not_parallel() -> None:
    api = Api(says(f"{CALL}\n{CALL_TIME}"))
    body = (await api.chat("Weather?", tools=TOOLS, parallel_tool_calls=False, max_tokens=200)).json()
    assert [call["function"]["name"] for call in body["choices"][0]["message"]["tool_calls"]] == ["weather"]


async def test_model_is_told_of_the_tools_it_may_use() -> None:
    async def prompt(**fields: Any) -> str:
        api = Api()
        assert (await api.chat("Weather?", max_tokens=1, **fields)).status_code == 200
        return embedded_tokenizer().decode(api.generator.requests[0].prompt_token_ids, skip_special_tokens=False)

    assert '"name": "weather"' in await prompt(tools=TOOLS)
    assert '"name": "weather"' in await prompt(tools=TOOLS, tool_choice="required")
    assert await prompt(tools=TOOLS, tool_choice="none") == await prompt()
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}
    some = await prompt(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert '"name": "time"' in some
    assert '"name": "weather"' not in some


async def test_named_function_is_held_to_its_parameters_and_ends_with_stop() -> None:
    api = Api(says(PARIS))
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 50}
    choice = (await api.chat("Weather?", **fields)).json()["choices"][0]
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": PARIS}
    assert choice["finish_reason"] == "stop"
    structure = api.generator.requests[0].params.structure
    assert structure is not None
    assert '"city"' in structure.text
    chunks = events(await api.chat("Weather?", stream=True, **fields))
    assert without_ids(streamed_message(chunks)) == without_ids(choice["message"])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert finish_reasons(chunks) == ["stop"]


async def test_required_call_is_read_as_it_is_demanded() -> None:
    text = f'[{{"name": "weather", "parameters": {PARIS}}}, {{"name": "time", "parameters": {{}}}}]'
    api = Api(says(text))
    choice = (await api.chat("Weather?", tools=TOOLS, tool_choice="required", max_tokens=90)).json()["choices"][0]
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [{"name": "weather", "arguments": PARIS}, {"name": "time", "arguments": "{}"}]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    structure = api.generator.requests[0].params.structure
    assert structure is not None
    assert structure.kind is StructureKind.GRAMMAR


@pytest.mark.parametrize("text", [CALL, '{"a": 5}'], ids=["call", "answer"])
async def test_tools_and_an_answers_format_go_together(text: str) -> None:
    api = Api(says(text))
    fields: dict[str, Any] = {"tools": TOOLS, "response_format": {"type": "json_object"}, "max_tokens": 99}
    choice = (await api.chat("Weather?", **fields)).json()["choices"][0]
    if text == CALL:
        assert choice["finish_reason"] == "tool_calls"
    else:
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    structure = api.generator.requests[0].params.structure
    assert structure is not None
    assert structure.kind is StructureKind.GRAMMAR


async def test_free_model_is_held_to_nothing() -> None:
    api = Api()
    await api.chat("Weather?", tools=TOOLS, max_tokens=1)
    assert api.generator.requests[0].params.structure is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": TOOLS, "guided_grammar": 'start: "x"'}, "tools"),
        ({"tools": TOOLS, "guided_regex": "x", "ignore_eos": True}, "ignore_eos"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_tools_that_mean_nothing_are_refused_by_their_field(fields: dict[str, Any], param: str) -> None:
    api = Api()
    assert error_of(await api.chat("Hi", **fields), 400)["param"] == param
    assert api.generator.requests == []


async def test_stop_string_ends_a_call_before_it_is_complete() -> None:
    choice = (await Api(says(CALL)).chat("Weather?", tools=TOOLS, stop=["ris"], max_tokens=99)).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Pâ'
    assert choice["stop_reason"] == "ris"


@functools.cache
def mistral_tokenizer() -> Tokenizer:
    """The embedded one with the special tokens that Mistral's models write calls with."""
    embedded = embedded_tokenizer()
    encoder = tokenizers.Tokenizer.from_str(embedded._encoder.to_str())
    encoder.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[OTHER]"])
    return Tokenizer(encoder, embedded.special)


@pytest.mark.parametrize("stream", [False, True])
async def test_special_tokens_that_calls_are_written_with_are_understood_and_not_shown(stream: bool) -> None:
    tokenizer = mistral_tokenizer()
    source = "{{ tools | tojson }}{{ messages[0].content }}{% if false %}[TOOL_CALLS]{% endif %}"
    tokens = [*tokenizer.encode("Now[OTHER]: [TOOL_CALLS]weather[ARGS]" + PARIS), *tokenizer.eos_token_ids]
    assert {tokenizer.token_id("[TOOL_CALLS]"), tokenizer.token_id("[OTHER]")} <= set(tokens)
    generator = FakeGenerator(served_model(vocab_size=tokenizer.vocab_size), script=lambda request: tokens)
    api = Api(generator, tokenizer, chat_template=ChatTemplate(source, {}))
    reply = await api.chat("Weather?", tools=TOOLS, max_tokens=99, stream=stream)
    message = streamed_message(events(reply)) if stream else reply.json()["choices"][0]["message"]
    assert message["content"] == "Now:"
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": PARIS}
    # Where no call is looked for, they are left out like all others.
    reply = await api.chat("Weather?", max_tokens=99)
    assert reply.json()["choices"][0]["message"]["content"] == "Now: weather" + PARIS


async def test_past_calls_come_back_as_they_were_made() -> None:
    api = Api(says(CALL))
    message = (await api.chat("Weather?", tools=TOOLS, max_tokens=99)).json()["choices"][0]["message"]
    answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Sunny"}
    conversation = [{"role": "user", "content": "Weather?"}, message, answer]
    assert (await api.chat(conversation, tools=TOOLS, max_tokens=1)).status_code == 200
    prompt = embedded_tokenizer().decode(api.generator.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert CALL in prompt
    assert "<tool_response>\nSunny\n</tool_response>" in prompt


async def test_tokenize_counts_the_tools_as_chat_does() -> None:
    api = Api()
    messages = [{"role": "user", "content": "Weather?"}]
    tokens = (await api.post("/tokenize", {"messages": messages, "tools": TOOLS})).json()["tokens"]
    await api.chat(messages, tools=TOOLS, max_tokens=1)
    assert tuple(tokens) == api.generator.requests[0].prompt_token_ids
    assert json.dumps("weather") in embedded_tokenizer().decode(tokens)

"""Structured output, tools and log-probabilities of prompts through OpenAI's own client and its helpers."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from gateway_thread import Endpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France, and is it a port?"}]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
STORY = "Once upon a time, in a small village by the sea, there lived a"


class Capital(BaseModel):
    """Every value of it is short, whatever a small model would like to write."""

    city: Literal["London", "Paris", "Rome"]
    is_port: bool
    rivers: list[Literal["Seine", "Thames", "Tiber"]] = Field(min_length=1, max_length=2)


class GetWeather(BaseModel):
    """Tells the weather of a city."""

    city: Literal["London", "Paris", "Rome"]
    unit: Literal["celsius", "fahrenheit"]


TOOL = openai.pydantic_function_tool(GetWeather, name="get_weather")
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def kwargs(endpoint: Endpoint) -> dict[str, Any]:
    return {"model": endpoint.model, "max_tokens": 80, "temperature": 0}


def test_text_is_held_to_a_schema_and_parsed_streamed_or_not(client: openai.OpenAI, kwargs: dict[str, Any]) -> None:
    answer = client.chat.completions.parse(messages=QUESTION, response_format=Capital, **kwargs).choices[0]
    assert isinstance(answer.message.parsed, Capital)
    assert answer.finish_reason == "stop"
    with client.chat.completions.stream(messages=QUESTION, response_format=Capital, **kwargs) as stream:
        written = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion().choices[0]
    assert written == answer.message.content
    assert final.message.parsed == answer.message.parsed


async def test_every_choice_is_held_to_the_schema(endpoint: Endpoint, kwargs: dict[str, Any]) -> None:
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
        reply = await client.chat.completions.parse(
            messages=QUESTION, response_format=Capital, n=3, seed=4, **kwargs | {"temperature": 1.5}
        )
    assert [isinstance(choice.message.parsed, Capital) for choice in reply.choices] == [True] * 3


def test_text_is_any_json_object(client: openai.OpenAI, kwargs: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": 'Repeat this JSON and nothing else: {"city": "Paris"}'}]
    answer = client.chat.completions.create(messages=messages, response_format={"type": "json_object"}, **kwargs)
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_schema_that_is_none_is_the_callers_mistake(client: openai.OpenAI, kwargs: dict[str, Any]) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(messages=QUESTION, response_format=form, **kwargs)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=QUESTION, response_format={"type": "other"}, **kwargs)  # type: ignore[call-overload]
    assert (refused.value.param or "").startswith("response_format")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_tool_is_called_streamed_or_not(client: openai.OpenAI, kwargs: dict[str, Any], choice: Any) -> None:
    kwargs = {**kwargs, "messages": WEATHER, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.parse(**kwargs).choices[0]
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert call.id
    assert not whole.message.content
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")

    with client.chat.completions.stream(**kwargs) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert "".join(pieces) == call.function.arguments
    assert len(pieces) > 1
    assert final.message.tool_calls is not None
    assert [each.function.parsed_arguments for each in final.message.tool_calls] == [call.function.parsed_arguments]
    assert final.finish_reason == whole.finish_reason


def test_model_that_may_call_a_tool_is_told_of_it_and_may_write_text(
    client: openai.OpenAI, kwargs: dict[str, Any]
) -> None:
    hello: list[Any] = [{"role": "user", "content": "Say hello."}]
    plain = client.chat.completions.create(messages=hello, **kwargs)
    none = client.chat.completions.create(messages=hello, tools=[TOOL], tool_choice="none", **kwargs)
    auto = client.chat.completions.create(messages=hello, tools=[TOOL], **kwargs)
    assert plain.usage is not None
    assert auto.usage is not None
    assert auto.usage.prompt_tokens > plain.usage.prompt_tokens
    for reply in (none, auto):
        assert reply.choices[0].message.content
        assert not reply.choices[0].message.tool_calls


def test_conversation_goes_on_after_a_tools_answer(client: openai.OpenAI, kwargs: dict[str, Any]) -> None:
    kwargs |= {"tools": [TOOL]}
    called = client.chat.completions.create(messages=WEATHER, tool_choice="required", **kwargs).choices[0].message
    assert called.tool_calls
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees"} for call in called.tool_calls
    ]
    answer = client.chat.completions.create(messages=[*WEATHER, called, *results], tool_choice="none", **kwargs)  # type: ignore[list-item]
    assert answer.choices[0].message.content


def test_log_probabilities_of_a_prompt_are_those_it_was_written_with(
    client: openai.OpenAI, kwargs: dict[str, Any]
) -> None:
    kwargs |= {"max_tokens": 8}
    written = client.completions.create(prompt=STORY, logprobs=1, **kwargs).choices[0]
    assert written.logprobs is not None
    kwargs |= {"prompt": STORY + written.text, "echo": True, "logprobs": 1}
    read = client.completions.create(**kwargs | {"max_tokens": 0})
    assert read.usage is not None
    assert read.usage.completion_tokens == 0
    lists = read.choices[0].logprobs
    assert lists is not None
    assert lists.tokens is not None
    assert lists.token_logprobs is not None
    assert read.choices[0].text == STORY + written.text == "".join(lists.tokens)
    assert lists.token_logprobs[0] is None
    assert lists.token_logprobs[-8:] == pytest.approx(written.logprobs.token_logprobs, abs=1e-3)

    whole = client.completions.create(**kwargs, n=2).choices
    assert whole[0].text == whole[1].text
    assert whole[0].text.startswith(STORY + written.text)
    chunks = list(client.completions.create(**kwargs, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[0].text
    streamed = [
        offset
        for chunk in chunks
        if chunk.choices[0].logprobs
        for offset in chunk.choices[0].logprobs.text_offset or ()
    ]
    assert whole[0].logprobs is not None
    assert streamed == whole[0].logprobs.text_offset

"""LiteLLM against a real gateway, as an OpenAI server and as one like vLLM."""

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import litellm
import pytest
from pydantic import BaseModel

from gateway_thread import Endpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("leaves_connections"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Rome?"}]
STORY = "Once upon a time, in a small village by the sea, there lived a"


class GetWeather(BaseModel):
    """Tells the weather of a city."""

    city: Literal["London", "Paris", "Rome"]
    unit: Literal["celsius", "fahrenheit"]


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": GetWeather.model_json_schema()}}


@pytest.fixture(autouse=True)
async def _close_clients(leaves_connections: None) -> AsyncIterator[None]:
    yield
    await litellm.close_litellm_async_clients()
    litellm.in_memory_llm_clients_cache.cache_dict.clear()


@pytest.fixture(params=["openai", "hosted_vllm"])
def provider(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def asks(endpoint: Endpoint, provider: str, **kwargs: Any) -> dict[str, Any]:
    return {
        "model": f"{provider}/{endpoint.model}",
        "api_base": endpoint.base_url,
        "api_key": endpoint.api_key,
        "temperature": 0,
        "max_tokens": 16,
        "num_retries": 0,
        "timeout": 60,
        **kwargs,
    }


async def test_chat_is_the_same_streamed_or_not_and_awaited(endpoint: Endpoint, provider: str) -> None:
    kwargs = asks(endpoint, provider, messages=QUESTION)
    answer = litellm.completion(**kwargs)
    text = answer.choices[0].message.content
    assert "Paris" in text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 3

    chunks = list(litellm.completion(**kwargs, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    whole = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert whole is not None
    assert whole.choices[0].message.content == text
    assert whole.usage.total_tokens == answer.usage.total_tokens

    assert (await litellm.acompletion(**kwargs)).choices[0].message.content == text
    stream = await litellm.acompletion(**kwargs, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text


async def test_text_is_completed(endpoint: Endpoint, provider: str) -> None:
    kwargs = asks(endpoint, "text-completion-openai" if provider == "openai" else provider, prompt=STORY)
    answer = litellm.text_completion(**kwargs)
    text = answer.choices[0].text
    assert text
    assert answer.usage.completion_tokens == 16
    stream = litellm.text_completion(**kwargs, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in stream) == text
    assert (await litellm.atext_completion(**kwargs)).choices[0].text == text


def test_choices_seed_stop_and_log_probabilities_reach_the_model(endpoint: Endpoint, provider: str) -> None:
    warm = asks(endpoint, provider, messages=QUESTION, temperature=1.2, seed=11, n=3)
    first, again = ([choice.message.content for choice in litellm.completion(**warm).choices] for _ in range(2))
    assert first == again
    assert len(set(first)) > 1

    answer = litellm.completion(**asks(endpoint, provider, messages=QUESTION, logprobs=True, top_logprobs=2)).choices[0]
    content = answer.logprobs.content
    assert all(len(token.top_logprobs) == 2 for token in content)
    assert "".join(token.token for token in content).startswith(answer.message.content)

    stopped = litellm.completion(**asks(endpoint, provider, messages=QUESTION, stop=["Paris"])).choices[0]
    assert stopped.message.content == answer.message.content.partition("Paris")[0]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tool_is_called_streamed_or_not(endpoint: Endpoint, provider: str, choice: Any) -> None:
    kwargs = asks(endpoint, provider, messages=WEATHER, tools=[TOOL], tool_choice=choice, max_tokens=80)
    message = litellm.completion(**kwargs).choices[0].message
    call = message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert GetWeather.model_validate_json(call.function.arguments)
    chunks = list(litellm.completion(**kwargs, stream=True))
    whole = litellm.stream_chunk_builder(chunks, messages=WEATHER)
    assert whole is not None
    calls = [(each.function.name, each.function.arguments) for each in whole.choices[0].message.tool_calls]
    assert calls == [(each.function.name, each.function.arguments) for each in message.tool_calls]


async def test_output_has_the_structure(endpoint: Endpoint, provider: str) -> None:
    kwargs = asks(endpoint, provider, messages=WEATHER, response_format=GetWeather, max_tokens=80)
    answer = litellm.completion(**kwargs).choices[0].message.content
    assert GetWeather.model_validate_json(answer)
    assert (await litellm.acompletion(**kwargs)).choices[0].message.content == answer
    form = {"type": "json_object"}
    answer = litellm.completion(**kwargs | {"response_format": form, "max_tokens": 200}).choices[0].message.content
    assert isinstance(json.loads(answer), dict)


def test_extensions_go_through(endpoint: Endpoint, provider: str) -> None:
    answer = litellm.completion(**asks(endpoint, provider, messages=QUESTION, extra_body={"ignore_eos": True}))
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


def test_wrong_requests_raise_its_own_errors(endpoint: Endpoint, provider: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**asks(endpoint, provider, messages=QUESTION) | {"model": f"{provider}/other"})
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(**asks(endpoint, provider, messages=QUESTION, top_p=3))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asks(endpoint, provider, messages=[{"role": "user", "content": "word " * 1100}]))


def test_key_that_is_none_is_its_own_error(locked_endpoint: Endpoint, provider: str) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**asks(locked_endpoint, provider, messages=QUESTION, api_key="sk-wrong"))

"""LiteLLM against a real gateway, as an OpenAI server and as one like vLLM."""

import gc
from collections.abc import AsyncIterator
from typing import Any

import litellm
import pytest

from gateway_thread import Endpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    # It closes some of its connections, and leaves the others to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STORY = "Once upon a time, in a small village by the sea, there lived a"


@pytest.fixture(autouse=True)
async def _close_clients() -> AsyncIterator[None]:
    yield
    await litellm.close_litellm_async_clients()
    litellm.in_memory_llm_clients_cache.cache_dict.clear()
    gc.collect()  # here, where it may warn


@pytest.fixture(params=["openai", "hosted_vllm"])
def provider(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def asks(endpoint: Endpoint, provider: str, **kwargs: Any) -> dict[str, Any]:
    return {
        "model": f"{provider}/{endpoint.model}",
        "api_base": endpoint.base_url,
        "api_key": "none",
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

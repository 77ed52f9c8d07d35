"""OpenAI's own client against a real gateway: what is sent is what its types allow, what comes back is typed by it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest

from gateway_thread import Endpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STORY = "Once upon a time, in a small village by the sea, there lived a"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def async_client(endpoint: Endpoint) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture
def model(endpoint: Endpoint) -> str:
    return endpoint.model


def test_models_are_listed_and_found(client: openai.OpenAI, model: str) -> None:
    assert [(each.id, each.object) for each in client.models.list()] == [(model, "model")]
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


async def test_completion_is_the_same_streamed_or_not_and_from_either_client(
    client: openai.OpenAI, async_client: openai.AsyncOpenAI, model: str
) -> None:
    kwargs: dict[str, Any] = {"model": model, "prompt": STORY, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**kwargs)
    text = whole.choices[0].text
    assert (whole.object, whole.model, whole.choices[0].finish_reason) == ("text_completion", model, "length")
    assert len(text) > 24
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24

    chunks = list(client.completions.create(**kwargs, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None] == [24]
    assert chunks[-1].choices == []
    assert len({chunk.id for chunk in chunks}) == 1

    assert (await async_client.completions.create(**kwargs)).choices[0].text == text
    stream = await async_client.completions.create(**kwargs, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == text


async def test_chat_is_the_same_streamed_or_not_and_from_either_client(
    client: openai.OpenAI, async_client: openai.AsyncOpenAI, model: str
) -> None:
    kwargs: dict[str, Any] = {"model": model, "messages": QUESTION, "max_completion_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**kwargs)
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert (whole.choices[0].message.role, whole.choices[0].finish_reason) == ("assistant", "stop")
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None

    chunks = list(client.chat.completions.create(**kwargs, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage is not None] == [whole.usage.total_tokens]

    assert (await async_client.chat.completions.create(**kwargs)).choices[0].message.content == text
    stream = await async_client.chat.completions.create(**kwargs, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text


def test_stream_helper_puts_the_chat_together(client: openai.OpenAI, model: str) -> None:
    kwargs: dict[str, Any] = {"model": model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    with client.chat.completions.stream(**kwargs, logprobs=True) as stream:
        written = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].message.content == written
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content is not None
    data = b"".join(bytes(token.bytes or ()) for token in final.choices[0].logprobs.content)
    assert data.decode().startswith(written)


def test_chat_takes_parts_and_every_role(client: openai.OpenAI, model: str) -> None:
    def answer(messages: Any) -> tuple[str | None, int]:
        reply = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0)
        assert reply.usage is not None
        return reply.choices[0].message.content, reply.usage.prompt_tokens

    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    assert answer(parts) == answer(QUESTION)
    system = [{"role": "system", "content": "Be brief."}, *QUESTION]
    assert answer([{"role": "developer", "content": "Be brief."}, *QUESTION]) == answer(system)
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    with_tools = [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
        {"role": "user", "content": "Thanks"},
    ]
    assert answer(with_tools)[0]


def test_seed_repeats_and_choices_of_one_seed_differ(client: openai.OpenAI, model: str) -> None:
    def texts(**kwargs: Any) -> list[str]:
        reply = client.completions.create(model=model, prompt=STORY, max_tokens=16, temperature=1.2, **kwargs)
        assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
        return [choice.text for choice in reply.choices]

    first = texts(seed=1234, n=3)
    assert texts(seed=1234, n=3) == first
    assert len(set(first)) == 3
    assert texts(seed=4321, n=3) != first
    assert texts(seed=1234)[0] == first[0]


def test_choices_stream_beside_each_other(client: openai.OpenAI, model: str) -> None:
    kwargs: dict[str, Any] = {
        "model": model,
        "messages": QUESTION,
        "n": 3,
        "max_tokens": 12,
        "temperature": 1,
        "seed": 5,
    }
    whole = client.chat.completions.create(**kwargs)
    texts = ["", "", ""]
    ends: list[tuple[int, str]] = []
    for chunk in client.chat.completions.create(**kwargs, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends.append((choice.index, choice.finish_reason))
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(ends) == [(choice.index, choice.finish_reason) for choice in whole.choices]


def test_text_ends_before_a_stop_string(client: openai.OpenAI, model: str) -> None:
    kwargs: dict[str, Any] = {"model": model, "prompt": STORY, "max_tokens": 32, "temperature": 0}
    text = client.completions.create(**kwargs).choices[0].text
    stop = text[len(text) // 2 :][:14]
    before = text[: text.find(stop)]
    whole = client.completions.create(**kwargs, stop=[stop, "☃"]).choices[0]
    assert (whole.text, whole.finish_reason) == (before, "stop")
    chunks = list(client.completions.create(**kwargs, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == before
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_log_probabilities_of_both_forms_agree(client: openai.OpenAI, model: str) -> None:
    kwargs: dict[str, Any] = {"model": model, "max_tokens": 8, "temperature": 0}
    chat = client.chat.completions.create(messages=QUESTION, logprobs=True, top_logprobs=3, **kwargs).choices[0]
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    for token in chat.logprobs.content:
        best = [top.logprob for top in token.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert len(best) == 3
        assert token.logprob == best[0] <= 0

    rendered = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    rendered += f"<|im_start|>user\n{QUESTION[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    completion = client.completions.create(prompt=rendered, logprobs=3, **kwargs).choices[0]
    assert completion.logprobs is not None
    assert completion.logprobs.token_logprobs == pytest.approx(
        [token.logprob for token in chat.logprobs.content], abs=1e-4
    )
    assert completion.logprobs.tokens == [token.token for token in chat.logprobs.content]
    assert "".join(completion.logprobs.tokens or ()).startswith(completion.text)


def test_prompts_of_every_form_are_answered_in_order(client: openai.OpenAI, endpoint: Endpoint) -> None:
    def texts(prompt: Any) -> list[str]:
        reply = client.completions.create(model=endpoint.model, prompt=prompt, max_tokens=6, temperature=0)
        return [choice.text for choice in reply.choices]

    prompts = ["The sky is", STORY]
    ids = [
        httpx.post(
            f"{endpoint.http_url}/tokenize", json={"prompt": prompt}, headers=endpoint.authorization, trust_env=False
        ).json()["tokens"]
        for prompt in prompts
    ]
    alone = [texts(prompt)[0] for prompt in prompts]
    assert texts(prompts) == texts(ids) == alone
    assert texts(ids[1]) == alone[1:]


def test_wrong_requests_raise_the_clients_own_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
        client.chat.completions.create(model="other", messages=QUESTION)
    assert (missing.value.param, missing.value.type) == ("model", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens") as too_long:
        client.completions.create(model=model, prompt=[5] * 1024, max_tokens=4, stream=True)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, prompt=STORY, temperature=-1, stream=True)
    assert (refused.value.param, refused.value.status_code) == ("temperature", 400)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=model, input="x")


def test_whoever_has_no_key_is_told_so(locked_endpoint: Endpoint) -> None:
    model, prompt = locked_endpoint.model, [5, 6, 7]
    with openai.OpenAI(base_url=locked_endpoint.base_url, api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            stranger.completions.create(model=model, prompt=prompt, stream=True)
        assert (refused.value.code, refused.value.status_code) == ("invalid_api_key", 401)
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        for key in ("sk-another", locked_endpoint.api_key):
            guest = stranger.with_options(api_key=key)
            assert (
                guest.completions.create(model=model, prompt=prompt, max_tokens=2).choices[0].finish_reason == "length"
            )


def test_raw_reply_has_the_requests_id_and_its_workers(client: openai.OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=QUESTION, max_tokens=2, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-tandem-prefill-worker"] == "prefill-0"
    assert raw.headers["x-tandem-decode-worker"] == "decode-0"
    assert raw.parse().choices[0].message.content
    with client.completions.with_streaming_response.create(
        model=model, prompt=STORY, max_tokens=2, stream=True
    ) as streamed:
        assert streamed.headers["x-tandem-decode-worker"] == "decode-0"
        assert streamed.request_id
        streamed.read()


async def test_many_at_once_get_their_own_answers(async_client: openai.AsyncOpenAI, model: str) -> None:
    async def answer(number: int) -> str:
        prompt = f"Story number {number}. {STORY}"
        reply = await async_client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0)
        return reply.choices[0].text

    alone = [await answer(number) for number in range(4)]
    together = await asyncio.gather(*(answer(number % 4) for number in range(12)))
    assert together == alone * 3


async def test_client_that_leaves_a_stream_disturbs_nobody(async_client: openai.AsyncOpenAI, model: str) -> None:
    before = await async_client.completions.create(model=model, prompt=STORY, max_tokens=8, temperature=0)
    for _ in range(3):
        stream = await async_client.completions.create(model=model, prompt=STORY, max_tokens=900, stream=True)
        await anext(aiter(stream))
        await stream.close()
    after = await async_client.completions.create(model=model, prompt=STORY, max_tokens=8, temperature=0)
    assert after.choices[0].text == before.choices[0].text


def test_extensions_go_through_extra_body(client: openai.OpenAI, model: str) -> None:
    kwargs: dict[str, Any] = {"model": model, "prompt": STORY, "max_tokens": 12, "temperature": 0}
    plain = client.completions.create(**kwargs).choices[0].text
    best = client.completions.create(**kwargs | {"temperature": 1.5}, extra_body={"top_k": 1}).choices[0].text
    assert best == plain
    ended = client.completions.create(
        **kwargs, extra_body={"stop_token_ids": [0], "min_tokens": 12, "ignore_eos": True}
    )
    assert ended.usage is not None
    assert ended.usage.completion_tokens == 12
    ids = client.completions.create(**kwargs, extra_body={"return_token_ids": True}).choices[0]
    assert ids.model_extra is not None
    first = ids.model_extra["token_ids"][0]
    biased = client.completions.create(**kwargs, logit_bias={str(first): -100}, extra_body={"return_token_ids": True})
    assert biased.choices[0].model_extra is not None
    assert first not in biased.choices[0].model_extra["token_ids"]

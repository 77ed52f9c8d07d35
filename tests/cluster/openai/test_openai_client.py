"""The official client, over the application in this process."""

import httpx2
import openai
import pydantic
import pytest

from cluster.errors import WorkerLost
from fake_generator import FakeGenerator
from gateway_api import MODEL, Api, says


def client_of(api: Api) -> openai.AsyncOpenAI:
    transport = httpx2.ASGITransport(api.app)
    return openai.AsyncOpenAI(
        base_url="http://gateway/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(transport=transport),
    )


async def test_client_chats() -> None:
    async with client_of(Api(says("Hello, world."))) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=20, logprobs=True, top_logprobs=2
        )
    assert answer.choices[0].message.content == "Hello, world."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None


async def test_client_streams_a_chat() -> None:
    async with client_of(Api(says("Hello, world."))) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello, world."
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


async def test_client_completes_and_streams_text() -> None:
    async with client_of(Api(says("there was a cat."))) as client:
        whole = await client.completions.create(model=MODEL, prompt="Once", max_tokens=20, extra_body={"top_k": 5})
        stream = await client.completions.create(model=MODEL, prompt="Once", max_tokens=20, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert whole.choices[0].text == text == "there was a cat."


class City(pydantic.BaseModel):
    city: str


CALL = '<tool_call>\n{"name": "City", "arguments": {"city": "Pâris"}}\n</tool_call>'


async def test_client_puts_a_streamed_call_together() -> None:
    tools = [openai.pydantic_function_tool(City)]
    async with (
        client_of(Api(says(f"I'll look.\n{CALL}"))) as client,
        client.chat.completions.stream(
            model=MODEL, messages=[{"role": "user", "content": "Weather?"}], tools=tools, max_tokens=99
        ) as stream,
    ):
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_completion()
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I'll look."
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.function.parsed_arguments == City(city="Pâris")
    assert kinds.count("tool_calls.function.arguments.delta") > 2
    assert kinds.count("tool_calls.function.arguments.done") == 1


async def test_client_parses_an_answer_of_a_schema() -> None:
    async with client_of(Api(says('{"city": "Pâris"}'))) as client:
        answer = await client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "Where?"}], response_format=City, max_tokens=99
        )
    assert answer.choices[0].message.parsed == City(city="Pâris")


async def test_client_reads_the_log_probabilities_of_an_echoed_prompt() -> None:
    async with client_of(Api()) as client:
        whole = await client.completions.create(model=MODEL, prompt="Once upon", max_tokens=0, echo=True, logprobs=1)
    (choice,) = whole.choices
    assert choice.text == "Once upon"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["Once", " upon"]


async def test_client_lists_models() -> None:
    async with client_of(Api()) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_client_understands_our_errors() -> None:
    async with client_of(Api()) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert caught.value.param == "temperature"


async def test_client_understands_an_error_in_the_middle_of_a_stream() -> None:
    api = Api(FakeGenerator(fail=WorkerLost("decode worker d0: gone"), fail_after=1))
    async with client_of(api) as client:
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="decode worker d0"):
            _ = [chunk async for chunk in stream]

"""Tools and structured output through LangChain."""

from typing import Any, Literal

import httpx
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from gateway_thread import Endpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("leaves_connections"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    # LangChain's, as it reads what it has parsed itself.
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
]

QUESTION = "What is the weather in Rome?"


class GetWeather(BaseModel):
    """Tells the weather of a city."""

    city: Literal["London", "Paris", "Rome"]
    unit: Literal["celsius", "fahrenheit"]


def chat_model(endpoint: Endpoint, **kwargs: Any) -> ChatOpenAI:
    values: dict[str, Any] = {"temperature": 0, "max_tokens": 80, "max_retries": 0, "timeout": 60} | kwargs
    return ChatOpenAI(base_url=endpoint.base_url, api_key=SecretStr(endpoint.api_key), model=endpoint.model, **values)


@pytest.mark.parametrize("choice", ["any", "GetWeather"])
@pytest.mark.asyncio(loop_scope="session")  # LangChain keeps connections for the next client
async def test_bound_tool_is_called_streamed_or_not(endpoint: Endpoint, choice: str) -> None:
    model = chat_model(endpoint).bind_tools([GetWeather], tool_choice=choice)
    answer = await model.ainvoke(QUESTION)
    (call,) = answer.tool_calls[:1]
    assert call["name"] == "GetWeather"
    assert GetWeather.model_validate(call["args"])
    assert not answer.invalid_tool_calls

    whole: AIMessageChunk | None = None
    for chunk in model.stream(QUESTION):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [each["args"] for each in whole.tool_calls] == [each["args"] for each in answer.tool_calls]

    result = ToolMessage("Sunny", tool_call_id=call["id"])
    assert chat_model(endpoint).invoke([HumanMessage(QUESTION), answer, result]).text


def test_bound_tool_need_not_be_called(endpoint: Endpoint) -> None:
    answer = chat_model(endpoint).bind_tools([GetWeather]).invoke("Say hello.")
    assert answer.text
    assert not answer.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.asyncio(loop_scope="session")
async def test_output_has_the_structure(endpoint: Endpoint, method: Any) -> None:
    model = chat_model(endpoint).with_structured_output(GetWeather, method=method)
    answer = model.invoke(QUESTION)
    assert isinstance(answer, GetWeather)
    assert await model.ainvoke(QUESTION) == answer
    assert list(model.stream(QUESTION))[-1] == answer


def test_tokens_are_counted_by_the_served_tokenizer(endpoint: Endpoint) -> None:
    def token_ids(text: str) -> list[int]:
        reply = httpx.post(
            f"{endpoint.http_url}/tokenize",
            json={"prompt": text},
            headers={"authorization": f"Bearer {endpoint.api_key}"},
            trust_env=False,
        )
        ids: list[int] = reply.json()["tokens"]
        return ids

    assert chat_model(endpoint, custom_get_token_ids=token_ids).get_num_tokens("The capital of France is") == 5

"""LangChain's OpenAI classes against a real gateway."""

import asyncio
from typing import Any

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import SecretStr

from gateway_thread import Endpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("leaves_connections"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

QUESTION = "What is the capital of France?"
STORY = "Once upon a time, in a small village by the sea, there lived a"


def chat_model(endpoint: Endpoint, **kwargs: Any) -> ChatOpenAI:
    values: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "max_retries": 0, "timeout": 60} | kwargs
    values = {"api_key": SecretStr(endpoint.api_key)} | values
    return ChatOpenAI(base_url=endpoint.base_url, model=endpoint.model, **values)


def text_model(endpoint: Endpoint, **kwargs: Any) -> OpenAI:
    values: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "max_retries": 0, "timeout": 60} | kwargs
    return OpenAI(base_url=endpoint.base_url, api_key=SecretStr(endpoint.api_key), model=endpoint.model, **values)


@pytest.mark.asyncio(loop_scope="session")  # it keeps connections for the next client
async def test_every_way_to_ask_gets_the_same_answer(endpoint: Endpoint) -> None:
    model = chat_model(endpoint)
    answer = model.invoke(QUESTION)
    assert "Paris" in answer.text
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == endpoint.model
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 3
    assert answer.usage_metadata["input_token_details"]["cache_read"] >= 0

    chunks = list(model.stream(QUESTION, stream_usage=True))
    assert "".join(chunk.text for chunk in chunks) == answer.text
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["total_tokens"] == answer.usage_metadata["total_tokens"]

    assert [reply.text for reply in model.batch([QUESTION] * 3)] == [answer.text] * 3
    assert (await model.ainvoke(QUESTION)).text == answer.text
    assert "".join([chunk.text async for chunk in model.astream(QUESTION)]) == answer.text
    together = await asyncio.gather(*(model.ainvoke(QUESTION) for _ in range(3)))
    assert {reply.text for reply in together} == {answer.text}


def test_conversation_with_every_kind_of_message_is_taken(endpoint: Endpoint) -> None:
    call = {"name": "weather", "args": {"city": "Paris"}, "id": "call_1", "type": "tool_call"}
    answer = chat_model(endpoint).invoke(
        [
            SystemMessage("Be brief."),
            HumanMessage([{"type": "text", "text": "Weather in Paris?"}]),
            AIMessage("", tool_calls=[call]),
            ToolMessage("Sunny", tool_call_id="call_1"),
            HumanMessage("Say it in a sentence."),
        ]
    )
    assert answer.text


def test_chain_asks_with_its_template(endpoint: Endpoint) -> None:
    prompt = ChatPromptTemplate.from_messages([("human", "What is the capital of {country}?")])
    assert (prompt | chat_model(endpoint)).invoke({"country": "France"}).text == chat_model(endpoint).invoke(
        QUESTION
    ).text


def test_log_probabilities_stop_seed_and_choices_reach_the_model(endpoint: Endpoint) -> None:
    answer = chat_model(endpoint, logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = answer.response_metadata["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [2] * len(content)
    assert "".join(token["token"] for token in content).startswith(answer.text)

    assert (
        chat_model(endpoint).invoke(QUESTION, stop=["Paris"]).text + "Paris"
        == answer.text.partition("Paris")[0] + "Paris"
    )

    warm = chat_model(endpoint, temperature=1.2, seed=7, n=3)
    (first,), (again,) = (
        warm.generate([[HumanMessage(QUESTION)]]).generations,
        warm.generate([[HumanMessage(QUESTION)]]).generations,
    )
    assert [choice.text for choice in first] == [choice.text for choice in again]
    assert len(first) == 3


def test_extensions_go_through_extra_body(endpoint: Endpoint) -> None:
    model = chat_model(endpoint, max_tokens=24, extra_body={"ignore_eos": True})
    answer = model.invoke(QUESTION)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 24
    assert answer.response_metadata["finish_reason"] == "length"


def test_text_model_completes_streams_and_tells_log_probabilities(endpoint: Endpoint) -> None:
    model = text_model(endpoint)
    text = model.invoke(STORY)
    assert text
    assert "".join(model.stream(STORY)) == text
    assert model.batch([STORY, "The sky is"])[0] == text

    (generation,) = text_model(endpoint, logprobs=2).generate([STORY]).generations[0]
    assert generation.text == text
    assert generation.generation_info is not None
    logprobs = generation.generation_info["logprobs"]
    assert "".join(logprobs["tokens"]) == text
    assert len(logprobs["token_logprobs"]) == 12
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"])


@pytest.mark.asyncio(loop_scope="session")
async def test_text_model_answers_several_prompts_and_choices_at_once(endpoint: Endpoint) -> None:
    result = await text_model(endpoint, n=2, best_of=2, temperature=1, seed=3).agenerate([STORY, "The sky is"])
    assert [len(choices) for choices in result.generations] == [2, 2]
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["completion_tokens"] == 48


def test_wrong_requests_raise(endpoint: Endpoint) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p"):
        chat_model(endpoint, top_p=2).invoke(QUESTION)
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(base_url=endpoint.base_url, api_key=SecretStr(endpoint.api_key), model="other").invoke(QUESTION)
    with pytest.raises(ContextOverflowError):
        chat_model(endpoint).invoke("word " * 1100)


def test_key_is_sent_and_its_refusal_told(locked_endpoint: Endpoint) -> None:
    assert text_model(locked_endpoint, max_tokens=2).generate(["!"]).generations[0]
    with pytest.raises(openai.AuthenticationError):
        chat_model(locked_endpoint, api_key=SecretStr("sk-wrong")).invoke(QUESTION)

"""Conversations over gRPC: the same prompt as over HTTP, tools, and what is refused."""

import json
from typing import Any

import grpc
import pytest

from cluster.text.chat_template import ChatTemplate
from engine.structure.spec import Structure, StructureKind
from fake_generator import FakeGenerator
from gateway_api import Api, embedded_tokenizer, says
from generation_api import Served, asking, chatting, check_joined, embedded_template, serving
from tandem.v1 import generation_pb2 as pb

WEATHER = pb.Tool(
    name="weather",
    description="The weather of a city.",
    parameters='{"type": "object", "properties": {"days": {"type": "integer", "default": 2}, "city": {}}}',
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Plzeň"}}\n</tool_call>'


def user(content: str = "Hi") -> pb.ChatMessage:
    return pb.ChatMessage(role="user", content=content)


async def answers(served: Served, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in served.stub.Generate(request)]


async def prompt_of(request: pb.GenerateRequest, template: ChatTemplate | None = None) -> str:
    async with serving(template=template or embedded_template()) as served:
        await answers(served, request)
        (sequence,) = served.generator.requests
        return embedded_tokenizer().decode(sequence.prompt_token_ids, skip_special_tokens=False)


async def refusal(request: pb.GenerateRequest, template: ChatTemplate | None = None) -> grpc.aio.AioRpcError:
    async with serving(template=template or embedded_template()) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(served, request)
        assert served.generator.requests == []
    return caught.value


@pytest.mark.parametrize(
    ("messages", "http"),
    [
        ([user("Ahoj 🍜")], [{"role": "user", "content": "Ahoj 🍜"}]),
        (
            [
                pb.ChatMessage(role="developer", content="Be brief."),
                pb.ChatMessage(
                    role="user",
                    content_parts=[pb.ContentPart(text="a"), pb.ContentPart(text=""), pb.ContentPart(text="b")],
                ),
                pb.ChatMessage(role="assistant", content_parts=[pb.ContentPart(refusal="No.")]),
                user(""),
            ],
            [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": text} for text in ("a", "", "b")]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"role": "user", "content": ""},
            ],
        ),
        (
            [
                user(),
                pb.ChatMessage(
                    role="assistant", tool_calls=[pb.ToolCall(id="c1", name="weather", arguments='{"city": "Plzeň"}')]
                ),
                pb.ChatMessage(role="tool", tool_call_id="c1", name="weather", content="rain"),
            ],
            [
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Plzeň"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "rain"},
            ],
        ),
    ],
    ids=["user", "parts", "tools"],
)
async def test_conversation_is_the_prompt_that_http_makes_of_it(
    messages: list[pb.ChatMessage], http: list[dict[str, Any]]
) -> None:
    api = Api()
    reply = await api.chat(http, max_tokens=1)
    assert reply.status_code == 200, reply.text
    async with serving(template=embedded_template()) as served:
        await answers(served, chatting(*messages, max_tokens=1))
        tokens = await served.stub.Tokenize(pb.TokenizeRequest(chat=pb.ChatInput(messages=messages)))
    assert served.generator.requests[0].prompt_token_ids == api.generator.requests[0].prompt_token_ids
    assert tuple(tokens.tokens) == api.generator.requests[0].prompt_token_ids


async def test_last_message_can_be_left_open_or_closed() -> None:
    said = pb.ChatMessage(role="assistant", content="Once upon")
    opened = await prompt_of(chatting(user(), said, continue_final_message=True))
    assert opened.endswith("<|im_start|>assistant\nOnce upon")
    closed = await prompt_of(chatting(user(), said, add_generation_prompt=False))
    assert closed.endswith("Once upon<|im_end|>\n")
    assert (await prompt_of(chatting(user(), said))).endswith("<|im_start|>assistant\n")


async def test_template_gets_its_variables_and_tools_with_the_order_of_their_keys() -> None:
    template = ChatTemplate("{{ variables | tojson }} {{ deep.b }} {{ tools | tojson }}{{ messages[0].content }}", {})
    variables = '{"variables": {"z": 1, "a": [1.5, null, true]}, "deep": {"b": 2}}'
    prompt = await prompt_of(chatting(tools=[WEATHER], chat_template_kwargs=variables), template)
    assert prompt.startswith('{"z": 1, "a": [1.5, null, true]} 2 [')
    assert '"properties": {"days": {"type": "integer", "default": 2}, "city"' in prompt
    assert '"description": "The weather of a city."' in prompt


async def test_calls_come_in_pieces_and_whole() -> None:
    async with serving(says(f"Well. {CALL}"), template=embedded_template()) as served:
        request = chatting(tools=[WEATHER], max_tokens=200)
        request.sampling_params.n = 2
        wholes = check_joined(await answers(served, request))
    assert set(wholes) == {0, 1}
    for whole in wholes.values():
        (call,) = whole.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Plzeň"})
        assert (whole.text, whole.finish_reason) == ("Well.", "tool_calls")
    assert wholes[0].tool_calls[0].id != wholes[1].tool_calls[0].id


async def test_model_that_may_not_call_only_speaks() -> None:
    async with serving(says(CALL), template=embedded_template()) as served:
        request = chatting(tools=[WEATHER], tool_choice=pb.ToolChoice(mode="none"), max_tokens=200)
        whole = check_joined(await answers(served, request))[0]
        plain = check_joined(await answers(served, chatting(max_tokens=200)))[0]
    assert (whole.text, whole.finish_reason) == (plain.text, "stop") == (CALL, "stop")
    assert served.generator.requests[0].prompt_token_ids == served.generator.requests[1].prompt_token_ids


async def test_demanded_call_holds_the_text_to_its_structure() -> None:
    async with serving(says('{"city": "Plzeň"}'), template=embedded_template()) as served:
        request = chatting(tools=[WEATHER], tool_choice=pb.ToolChoice(function="weather"), max_tokens=200)
        whole = check_joined(await answers(served, request))[0]
    structure = served.generator.requests[0].params.structure
    assert structure is not None
    assert structure.kind is StructureKind.GRAMMAR
    assert [(call.name, call.arguments) for call in whole.tool_calls] == [("weather", '{"city": "Plzeň"}')]
    assert (whole.text, whole.finish_reason) == ("", "stop")  # the caller named it; so OpenAI has it


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ({"messages": [pb.ChatMessage(role="poet", content="x")]}, "messages[0].role"),
        ({"messages": [user(), pb.ChatMessage(role="user")]}, "messages[1].content is missing"),
        (
            {"messages": [pb.ChatMessage(role="user", content="a", content_parts=[pb.ContentPart(text="b")])]},
            "messages[0] has both content and content_parts",
        ),
        ({"messages": [pb.ChatMessage(role="user", content_parts=[pb.ContentPart()])]}, "messages[0].content[0]"),
        ({"tools": [pb.Tool(name="")]}, "tools[0]"),
        ({"tools": [pb.Tool(name="f", parameters="{")]}, "tools[0].parameters is not JSON"),
        ({"tools": [pb.Tool(name="f", parameters="[]")]}, "tools[0].parameters must be a JSON object"),
        ({"tools": [pb.Tool(name="f", parameters='{"a": NaN}')]}, "tools[0].parameters is not JSON"),
        ({"tools": [pb.Tool(name="f", parameters='{"a":' * 100_000)]}, "tools[0].parameters is not JSON"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tool_choice": pb.ToolChoice(mode="required")}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": pb.ToolChoice(mode="perhaps")}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": pb.ToolChoice(function="wether")}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": pb.ToolChoice(allowed_functions=["weather"])}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": pb.ToolChoice(mode="auto", allowed_functions=["wether"])},
            "tool_choice",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": "3"}, "chat_template_kwargs must be a JSON object"),
    ],
)
async def test_conversation_that_is_none_names_the_field(chat: dict[str, Any], words: str) -> None:
    error = await refusal(chatting(*chat.pop("messages", [user()]), **chat))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in error.details()


async def test_no_messages_are_no_conversation() -> None:
    error = await refusal(pb.GenerateRequest(chat=pb.ChatInput()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "messages" in error.details()


async def test_a_text_is_calls_or_has_the_structure_that_was_asked_for() -> None:
    request = chatting(tools=[WEATHER])
    request.sampling_params.structure.json_object = True
    async with serving(template=embedded_template()) as served:
        await answers(served, request)
        request.chat.tool_choice.mode = "none"
        await answers(served, request)
    either, alone = (served_request.params.structure for served_request in served.generator.requests)
    assert either is not None
    assert either.kind is StructureKind.GRAMMAR
    assert "calls | content" in either.text
    assert alone == Structure(StructureKind.JSON_OBJECT)


async def test_a_grammar_leaves_no_room_for_calls() -> None:
    request = chatting(tools=[WEATHER])
    request.sampling_params.structure.grammar = 'start: "x"'
    error = await refusal(request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "grammar" in error.details()


async def test_model_without_a_template_takes_no_conversations() -> None:
    async with serving() as served:
        with pytest.raises(grpc.aio.AioRpcError, match="no chat template") as caught:
            await answers(served, chatting())
        info = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
        await answers(served, asking(max_tokens=1))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not info.has_chat_template
    async with serving(FakeGenerator(), template=embedded_template()) as served:
        assert (await served.stub.GetModelInfo(pb.GetModelInfoRequest())).has_chat_template

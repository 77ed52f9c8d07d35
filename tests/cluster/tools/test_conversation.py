"""Conversations with tools as prompts, by templates that know tools and by one that does not."""

import json
from typing import Any

import pytest

from cluster.errors import InvalidRequest
from cluster.text.chat_template import ChatTemplate
from cluster.text.messages import parse_messages
from cluster.tools.call_style import CallStyle, call_style, markup_token_ids
from cluster.tools.conversation import render_conversation
from cluster.tools.tool import Tool
from gateway_api import embedded_tokenizer

USER = {"role": "user", "content": "Weather in Paris and Rome?"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = Tool("weather", {"type": "object", "properties": {"city": {"type": "string"}}}, "Tells the weather. é")
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": f"call_{city}",
            "type": "function",
            "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'},
        }
        for city in ("Paris", "Rome")
    ],
}
ANSWERS = [
    {"role": "tool", "tool_call_id": "call_Paris", "content": "Sunny"},
    {"role": "tool", "tool_call_id": "call_Rome", "content": [{"type": "text", "text": "Rain"}]},
]
KNOWING = (
    "{%- if tools %}[{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)


def embedded_template() -> ChatTemplate:
    tokenizer = embedded_tokenizer()
    assert tokenizer.chat_template is not None
    return ChatTemplate(tokenizer.chat_template, tokenizer.special.names)


def render(template: ChatTemplate, messages: list[Any], *tools: Tool, **options: Any) -> str:
    return render_conversation(template, parse_messages(messages), tools, **options)


def test_template_is_known_to_tell_of_tools_or_not() -> None:
    assert ChatTemplate(KNOWING, {}).uses_tools
    assert not embedded_template().uses_tools
    assert not ChatTemplate("{{ messages[0].tools }}{# tools #}{{ 'tools' }}", {}).uses_tools


def test_template_that_knows_tools_is_given_them_and_the_calls() -> None:
    text = render(ChatTemplate(KNOWING, {}), [USER, CALLS, *ANSWERS], TOOL)
    assert text.startswith(f"[{json.dumps(TOOL.json(), ensure_ascii=False)}]<user>")
    assert '<assistant><tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>' in text
    assert text.endswith("<tool>Sunny<tool>Rain")


def test_template_without_tools_has_them_told_by_the_system() -> None:
    text = render(embedded_template(), [USER], TOOL)
    assert text.startswith("<|im_start|>system\n")
    assert f"<tools>\n{json.dumps(TOOL.json(), ensure_ascii=False)}\n</tools>" in text
    assert text.count("<|im_start|>system") == 1
    assert text.endswith("<|im_start|>user\nWeather in Paris and Rome?<|im_end|>\n<|im_start|>assistant\n")


def test_tools_are_told_after_the_systems_own_words() -> None:
    text = render(embedded_template(), [SYSTEM, USER], TOOL)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou have functions")
    assert text.count("<|im_start|>system") == 1


@pytest.mark.parametrize("tools", [(), (TOOL,)])
def test_past_calls_and_answers_are_written_out_for_a_template_without_tools(tools: tuple[Tool, ...]) -> None:
    text = render(embedded_template(), [USER, CALLS, *ANSWERS], *tools)
    assert text.endswith(
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n"
        "<tool_response>\nSunny\n</tool_response>\n<tool_response>\nRain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


REFUSING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
)
LEAVING_OUT = (
    "{% for message in messages if message.role != 'system' %}<{{ message.role }}>{{ message.content }}{% endfor %}"
)


@pytest.mark.parametrize("source", [REFUSING, LEAVING_OUT], ids=["refuses", "leaves out"])
def test_template_without_a_system_has_the_user_told_of_tools(source: str) -> None:
    template = ChatTemplate(source, {})
    assert not template.takes_system
    text = render(template, [USER, CALLS, *ANSWERS], TOOL)
    assert text.startswith("<user>You have functions")
    assert "</tool_call>\n\nWeather in Paris and Rome?<assistant>" in text
    assert text.count("<user>") == 2
    assert render(template, [CALLS, *ANSWERS], TOOL).startswith("<user>You have functions")
    assert render(template, [USER]) == "<user>Weather in Paris and Rome?"


def test_template_is_known_to_have_a_place_for_the_system() -> None:
    assert embedded_template().takes_system
    assert ChatTemplate(KNOWING, {}).takes_system


def test_words_beside_calls_stand_before_them() -> None:
    text = render(embedded_template(), [USER, {**CALLS, "content": "I'll look."}])
    assert "I'll look.\n<tool_call>" in text


def test_conversation_without_tools_is_the_templates_alone() -> None:
    messages = [SYSTEM, USER]
    assert render(embedded_template(), messages) == embedded_template().render(messages)


def test_final_message_is_gone_on_from() -> None:
    messages = [USER, {"role": "assistant", "content": "It is "}]
    text = render(embedded_template(), messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nIt is ")
    trims = ChatTemplate("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", {})
    assert render(trims, messages, continue_final_message=True).endswith("<It is")


def test_final_message_that_the_template_leaves_out_cannot_be_gone_on_from() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(ChatTemplate("{{ messages[0].content }}", {}), [SYSTEM, USER], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("source", "style"),
    [
        ("…[TOOL_CALLS]{{ x }}", CallStyle.MISTRAL),
        ("…<tool_call>{{ x }}</tool_call>", CallStyle.HERMES),
        ("…<|python_tag|>", CallStyle.LLAMA),
        ("{% if message.role == 'ipython' %}", CallStyle.LLAMA),
        ("{{ messages }}", CallStyle.HERMES),
    ],
)
def test_template_shows_how_its_model_writes_calls(source: str, style: CallStyle) -> None:
    assert call_style(source) is style


def test_markup_of_no_special_tokens_needs_none_kept() -> None:
    assert markup_token_ids(embedded_tokenizer(), CallStyle.HERMES) == ()

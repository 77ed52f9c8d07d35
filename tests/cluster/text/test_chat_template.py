"""Chat templates: the prompt is the one that transformers would make, and nothing escapes the sandbox."""

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from cluster.errors import InvalidRequest
from cluster.text.chat_template import ChatTemplate
from gateway_api import embedded_tokenizer

USER = {"role": "user", "content": "Wie geht's? 🍜"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "  Well.\n"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"ö": {}}}}}

TOOL_TEMPLATE = """
{%- if tools %}
    {{- bos_token }}[{% for tool in tools %}{{ tool | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]
    {{- tools | tojson(indent=2) }}
{% endif %}
{%- for message in messages %}
    {% if message.role == 'skip' %}
        {% continue %}
    {% endif %}
    {% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
    {% else %}
<{{ message.role }}>{{ message.content | trim }}
    {% endif %}
{% endfor %}
"""


def embedded_template() -> ChatTemplate:
    tokenizer = embedded_tokenizer()
    assert tokenizer.chat_template is not None
    return ChatTemplate(tokenizer.chat_template, tokenizer.special.names)


def transformers_text(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=source, **variables)
    text: str = rendered[0]
    return text


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    "messages",
    [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [SYSTEM], [USER, USER], [ASSISTANT]],
    ids=["user", "system", "turns", "only system", "two users", "assistant first"],
)
def test_embedded_template_renders_as_transformers_does(
    messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    source = embedded_tokenizer().chat_template
    assert source is not None
    text = embedded_template().render(messages, add_generation_prompt=add_generation_prompt)
    assert text == transformers_text(source, messages, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("tools", [None, [TOOL], [TOOL, TOOL]], ids=["none", "one", "two"])
def test_blocks_tools_and_tags_render_as_in_transformers(tools: list[dict[str, Any]] | None) -> None:
    messages = [SYSTEM, {"role": "skip", "content": "x"}, USER, ASSISTANT]
    text = ChatTemplate(TOOL_TEMPLATE, {"bos_token": "<s>"}).render(messages, tools=tools)
    assert text == transformers_text(TOOL_TEMPLATE, messages, tools=tools, bos_token="<s>")


def test_prompt_of_the_embedded_model_ends_where_the_assistant_begins() -> None:
    assert embedded_template().render([SYSTEM, {"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ 'deep' if enable_thinking else 'flat' }}{{ messages | length }}", {})
    assert template.render([USER], variables={"enable_thinking": True, "messages": "not these"}) == "deep1"


def test_time_is_the_clock_that_was_passed_in() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2026, 2, 1))
    assert template.render([USER]) == "01 Feb 2026"


def test_refusal_of_the_template_is_the_clients_error() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render([USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render([USER])


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{{ nothing.at.all }}"])
def test_template_that_fails_is_the_clients_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match="does not accept this conversation"):
        ChatTemplate(source, {}).render([USER])


def test_template_that_is_none_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(ValueError, match="no valid template"):
        ChatTemplate("{% if %}", {})

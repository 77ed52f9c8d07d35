"""A conversation with tools as one prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import InvalidRequest
from cluster.text.chat_template import ChatTemplate
from cluster.tools.hermes_messages import hermes_messages
from cluster.tools.tool import Tool

# Put behind the last message to find its end again; the space tells whether the template strips what it is given.
_END = "\ue000\ue001\ue000"


def render_conversation(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool] = (),
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt, by the model's template; what that does not know of tools is written into messages.

    Args:
        messages: as `parse_messages` makes them.
        tools: those that the model is told of.
        continue_final_message: the prompt ends with the last message's last word, which the model goes on from.

    Raises:
        InvalidRequest: the template refuses the conversation.
    """
    plain = [dict(message) for message in messages]
    if not template.uses_tools:
        plain = hermes_messages(plain, tools, takes_system=template.takes_system)
    if continue_final_message:
        plain[-1]["content"] += _END + " "
    text = template.render(
        plain,
        tools=[tool.json() for tool in tools] if template.uses_tools else None,
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        variables=variables,
    )
    return _cut(text) if continue_final_message else text


def _cut(text: str) -> str:
    before, end, after = text.rpartition(_END)
    if not end:
        raise InvalidRequest(
            "the model's chat template leaves out the last message, so that it cannot be continued",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()

"""Conversations with tools for models whose chat template knows none: all of it is written into plain messages.

The form is Hermes', which more open models have been trained on than any other: tools between `<tools></tools>`, calls
between `<tool_call></tool_call>`, what tools answered between `<tool_response></tool_response>` in a user's turn.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.tools.hermes_parser import CLOSE, OPEN
from cluster.tools.tool import Tool

Message = Mapping[str, Any]

_INSTRUCTION = """You have functions that you can call where they help to answer. Their descriptions, one JSON object \
a line, stand between <tools> and </tools>:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and arguments between {open} and {close}, one for each call:
{open}
{{"name": "<name of the function>", "arguments": {{"<name of an argument>": <its value>}}}}
{close}"""


def hermes_messages(
    messages: Sequence[Message], tools: Sequence[Tool], *, takes_system: bool = True
) -> list[dict[str, Any]]:
    """The conversation in roles that every template knows: user, assistant, and the system if that has a place.

    Args:
        messages: as `parse_messages` makes them: content is a string.
        takes_system: otherwise the tools are told of at the beginning of what the user says first.
    """
    plain: list[dict[str, Any]] = []
    was_answer = False
    for message in messages:
        is_answer = message["role"] in ("tool", "function")
        if not is_answer:
            plain.append(_without_calls(message))
        else:
            content = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_answer:
                plain[-1]["content"] += "\n" + content
            else:
                plain.append({"role": "user", "content": content})
        was_answer = is_answer
    if tools:
        _tell(plain, _instruction(tools), takes_system)
    return plain


def _tell(messages: list[dict[str, Any]], instruction: str, takes_system: bool) -> None:
    """Puts the instruction where the model will see it first, or behind the system's own words."""
    if messages[0]["role"] == "system":
        messages[0]["content"] += f"\n\n{instruction}"
    elif takes_system:
        messages.insert(0, {"role": "system", "content": instruction})
    elif messages[0]["role"] == "user":
        messages[0]["content"] = f"{instruction}\n\n{messages[0]['content']}"
    else:
        messages.insert(0, {"role": "user", "content": instruction})


def _instruction(tools: Sequence[Tool]) -> str:
    lines = "\n".join(json.dumps(tool.json(), ensure_ascii=False) for tool in tools)
    return _INSTRUCTION.format(tools=lines, open=OPEN, close=CLOSE)


def _without_calls(message: Message) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    lines = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls") or ():
        function = {key: call["function"][key] for key in ("name", "arguments")}
        lines.append(f"{OPEN}\n{json.dumps(function, ensure_ascii=False)}\n{CLOSE}")
    return plain | {"content": "\n".join(lines)}

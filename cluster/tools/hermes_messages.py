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


def hermes_messages(messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The conversation in roles that every template knows: system, user, assistant.

    `messages` are as `parse_messages` makes them: content is a string.
    """
    plain: list[dict[str, Any]] = []
    if tools:
        plain.append({"role": "system", "content": _instruction(tools)})
    was_answer = False
    for message in messages:
        is_answer = message["role"] in ("tool", "function")
        if is_answer:
            content = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_answer:
                plain[-1]["content"] += "\n" + content
            else:
                plain.append({"role": "user", "content": content})
        elif tools and message is messages[0] and message["role"] == "system":
            plain[0]["content"] = f"{message['content']}\n\n{plain[0]['content']}"
        else:
            plain.append(_without_calls(message))
        was_answer = is_answer
    return plain


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

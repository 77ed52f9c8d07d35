"""The messages of a conversation, checked and brought into the form that chat templates expect.

Templates know a message's `role`, its `content` as one string, and the assistant's `tool_calls` with their arguments as
an object. Clients write content as a list of parts, leave it null beside tool calls, and send arguments as a string.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import InvalidRequest
from cluster.quotation import shorten

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# What OpenAI calls developer, models were trained to know as system.
_TEMPLATE_ROLE = {"developer": "system"}
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # type of part -> its field


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """The messages for a chat template.

    Raises:
        InvalidRequest: names the message and what is wrong with it.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object, not {shorten(message)}", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(ROLES)}, not {shorten(role)}", param=f"{where}.role"
        )
    out: dict[str, Any] = {"role": _TEMPLATE_ROLE.get(role, role)}
    calls = _calls(message, where) if role == "assistant" else []
    if calls:
        out["tool_calls"] = calls
    content = message.get("content")
    if content is None:
        refusal = message.get("refusal") if role == "assistant" else None
        if not calls and not isinstance(refusal, str):
            raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
        content = refusal or ""
    out["content"] = _text(content, f"{where}.content")
    if role == "assistant" and isinstance(message.get("reasoning_content"), str):
        out["reasoning_content"] = message["reasoning_content"]
    if role in ("tool", "function"):
        # Some templates tell the model which tool answers; other roles' names no template knows.
        out |= _texts(message, ("name", "tool_call_id"), where)
    return out


def _texts(message: Mapping[str, Any], keys: Sequence[str], where: str) -> dict[str, str]:
    """Those of the keys that are there; each must be a string."""
    texts = {key: message[key] for key in keys if message.get(key) is not None}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}.{key} must be a string, not {shorten(text)}", param=f"{where}.{key}")
    return texts


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts, not {shorten(content)}", param=where)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise InvalidRequest(
                f"{where}[{number}] must be a part of type text, not {shorten(kind if kind else part)}",
                param=f"{where}[{number}]",
            )
        text = part.get(field)
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}[{number}].{field} must be a string", param=f"{where}[{number}].{field}")
        texts.append(text)
    return "\n".join(texts)


def _calls(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The calls of an assistant's message, in their newer or their older form."""
    calls = message.get("tool_calls")
    if not calls:
        old = message.get("function_call")
        return [_call(None, old, f"{where}.function_call")] if old else []
    where = f"{where}.tool_calls"
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list, not {shorten(calls)}", param=where)
    found = []
    for number, call in enumerate(calls):
        if not isinstance(call, dict):
            raise InvalidRequest(
                f"{where}[{number}] must be an object, not {shorten(call)}", param=f"{where}[{number}]"
            )
        found.append(_call(call.get("id"), call.get("function"), f"{where}[{number}].function"))
    return found


def _call(call_id: Any, function: Any, where: str) -> dict[str, Any]:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must be an object with a name, not {shorten(function)}", param=where)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(function.get("arguments"), where)},
    }


def _arguments(arguments: Any, where: str) -> Any:
    """Arguments as an object where they are one: templates print them as JSON themselves."""
    if arguments is None:
        return {}
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise InvalidRequest(
            f"{where}.arguments must be a string, not {shorten(arguments)}", param=f"{where}.arguments"
        )
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # the model wrote no JSON; its words stand as they are
    return parsed if isinstance(parsed, dict) else arguments

"""A conversation as gRPC carries it, in the form that the HTTP API's messages have: from there on both are one.

JSON schemas, arguments and template variables are JSON in strings, on this wire: google.protobuf.Struct keeps neither
the order of keys nor whole numbers, and models see both.
"""

from collections.abc import Iterable
from typing import Any

from cluster.errors import InvalidRequest
from engine.strict_json import parse_json
from tandem.v1 import generation_pb2


def openai_messages(messages: Iterable[generation_pb2.ChatMessage]) -> list[dict[str, Any]]:
    """The messages as `/v1/chat/completions` takes them, still unchecked.

    Raises:
        InvalidRequest: a message has its content twice.
    """
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: generation_pb2.ChatMessage, where: str) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role}
    if message.HasField("content") and message.content_parts:
        raise InvalidRequest(f"{where} has both content and content_parts", param=f"{where}.content_parts")
    if message.content_parts:
        out["content"] = [_part(part) for part in message.content_parts]
    for name in ("content", "name", "tool_call_id", "reasoning_content"):
        if message.HasField(name):
            out[name] = getattr(message, name)
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return out


def _part(part: generation_pb2.ContentPart) -> dict[str, Any]:
    kind = part.WhichOneof("part")
    return {} if kind is None else {"type": kind, kind: getattr(part, kind)}


def openai_tools(tools: Iterable[generation_pb2.Tool]) -> list[dict[str, Any]]:
    """The tools as `/v1/chat/completions` takes them, still unchecked.

    Raises:
        InvalidRequest: parameters that are no JSON object.
    """
    return [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]


def _tool(tool: generation_pb2.Tool, where: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    for name in ("description", "strict"):
        if tool.HasField(name):
            function[name] = getattr(tool, name)
    if tool.HasField("parameters"):
        function["parameters"] = json_object(tool.parameters, f"{where}.parameters")
    return {"type": "function", "function": function}


def openai_tool_choice(choice: generation_pb2.ToolChoice) -> Any:
    """The choice as `/v1/chat/completions` takes it, still unchecked; None: not given.

    Raises:
        InvalidRequest: it says what may be called, but not whether.
    """
    kind = choice.WhichOneof("choice")
    if choice.allowed_functions:
        if kind != "mode":
            raise InvalidRequest("tool_choice.allowed_functions goes with a mode", param="tool_choice")
        allowed = [_function(name) for name in choice.allowed_functions]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": allowed}}
    match kind:
        case None:
            return None
        case "mode":
            return choice.mode
        case _:
            return _function(choice.function)


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def json_object(text: str, where: str) -> dict[str, Any]:
    """
    Raises:
        InvalidRequest: it is something else.
    """
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{where} is not JSON: {exc}", param=where) from exc
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be a JSON object, not {type(value).__name__}", param=where)
    return value

"""What the model may do with tools, and what it must: `tools`, `tool_choice` and `parallel_tool_calls` together."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cluster.errors import InvalidRequest
from cluster.quotation import shorten
from cluster.tools.tool import Tool, parse_tools
from engine.sampling_params import FinishReason


class ToolMode(Enum):
    """How free the model is."""

    NONE = "none"  # it knows of no tools
    AUTO = "auto"  # it calls or it speaks
    REQUIRED = "required"  # it calls
    NAMED = "function"  # it calls this one

    def finish_reason(self, reason: FinishReason, *, has_calls: bool) -> str:
        """What a client is told of a message's end; a call that was cut off says so.

        OpenAI says stop, where the caller has named the function.
        """
        is_call = has_calls and self is not ToolMode.NAMED
        return "tool_calls" if is_call and reason is FinishReason.STOP else reason.value


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one call.

    `tools` are those that the model is told of and may call. Where one is named, `named` is it.
    """

    mode: ToolMode = ToolMode.NONE
    tools: tuple[Tool, ...] = ()
    named: Tool | None = None
    is_parallel: bool = True  # whether it may call more than one

    @property
    def is_forced(self) -> bool:
        """Whether nothing but calls may come."""
        return self.mode in (ToolMode.REQUIRED, ToolMode.NAMED)


def parse_tool_use(tools: Any = None, tool_choice: Any = None, parallel_tool_calls: Any = None) -> ToolUse:
    """From the three fields of a request, as JSON holds them. An empty list of tools is none.

    Raises:
        InvalidRequest: names the field.
    """
    known = parse_tools(tools)
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        raise InvalidRequest(
            f"parallel_tool_calls must be true or false, not {shorten(parallel_tool_calls)}",
            param="parallel_tool_calls",
        )
    is_parallel = parallel_tool_calls is not False
    match tool_choice:
        case None | "auto":
            return ToolUse(ToolMode.AUTO, known, is_parallel=is_parallel) if known else ToolUse()
        case "none":
            return ToolUse()
        case "required":
            _demand_tools(known)
            return ToolUse(ToolMode.REQUIRED, known, is_parallel=is_parallel)
        case {"type": "function"}:
            named = _find(tool_choice, known, "tool_choice")
            return ToolUse(ToolMode.NAMED, known, named, is_parallel=False)
        case {"type": "allowed_tools"}:
            return _allowed(tool_choice.get("allowed_tools"), known, is_parallel)
    raise InvalidRequest(
        'tool_choice must be "none", "auto", "required", or an object of type "function" or "allowed_tools", not '
        f"{shorten(tool_choice)}",
        param="tool_choice",
    )


def _allowed(value: Any, known: Sequence[Tool], is_parallel: bool) -> ToolUse:
    where = "tool_choice.allowed_tools"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object, not {shorten(value)}", param=where)
    mode = value.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f'{where}.mode must be "auto" or "required", not {shorten(mode)}', param=f"{where}.mode")
    chosen = value.get("tools")
    if not isinstance(chosen, list) or not chosen:
        raise InvalidRequest(f"{where}.tools must be a list of at least one tool", param=f"{where}.tools")
    tools = {_find(item, known, f"{where}.tools[{number}]").name for number, item in enumerate(chosen)}
    return ToolUse(ToolMode(mode), tuple(tool for tool in known if tool.name in tools), is_parallel=is_parallel)


def _find(value: Any, known: Sequence[Tool], where: str) -> Tool:
    """The tool that `{"type": "function", "function": {"name"}}` names."""
    match value:
        case {"type": "function", "function": {"name": str() as name}}:
            _demand_tools(known)
            for tool in known:
                if tool.name == name:
                    return tool
            where = f"{where}.function.name"
            raise InvalidRequest(f"{where} is {shorten(name)}, which is none of the tools", param=where)
    raise InvalidRequest(f'{where} must be of type "function" and have a function with a name', param=where)


def _demand_tools(known: Sequence[Tool]) -> None:
    if not known:
        raise InvalidRequest("tool_choice demands a call, but there are no tools", param="tool_choice")

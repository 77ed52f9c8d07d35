"""The grammar of a text that is either calls or has a structure of its own: tools and an answer's format together.

Calls are written as the model was trained to, since it is free to write none; so its parser is the one of its style.
"""

import json
import re
from collections.abc import Sequence

from cluster.errors import InvalidRequest
from cluster.structure_origin import StructureOrigin
from cluster.tools.call_structure import call_structure
from cluster.tools.call_style import CallStyle
from cluster.tools.tool import Tool
from cluster.tools.tool_use import ToolMode, ToolUse
from engine.structure.grammar import lark_rules
from engine.structure.spec import Structure, StructureKind
from engine.tokenizer.tokenizer import Tokenizer


def answer_structure(
    use: ToolUse,
    content: Structure | None,
    style: CallStyle,
    tokenizer: Tokenizer,
    *,
    content_field: str = "structure",
) -> Structure | None:
    """What the text is held to, where `content` says what it is to be if it calls nothing; None: nothing.

    Args:
        content_field: what errors call `content`.

    Raises:
        InvalidRequest: `content` is not what its kind says, or a grammar, which cannot be a part of another.
    """
    if content is None or use.is_forced:
        return call_structure(use)
    if use.mode is ToolMode.NONE:
        return content
    if content.kind is StructureKind.GRAMMAR:
        raise InvalidRequest(
            'tools are not allowed for a text that is held to a grammar, except with tool_choice "none"', param="tools"
        )
    try:
        rules = lark_rules(content, "content")
    except ValueError as exc:
        raise StructureOrigin(content_field).named(InvalidRequest(str(exc)), content) from exc
    lines = ["start: calls | content", rules, *_Calls(use, style, tokenizer).lines()]
    return Structure(StructureKind.GRAMMAR, "\n".join(lines))


def answer_origin(
    use: ToolUse, content: Structure | None, answer: Structure | None, *, content_field: str = "structure"
) -> StructureOrigin:
    """Where what `answer_structure` answered comes from."""
    if answer is None or answer is content:
        return StructureOrigin(content_field)
    if use.named is not None:
        return StructureOrigin(use.named.where)
    lines = dict[int, str]()
    for number, line in enumerate(answer.text.split("\n"), 1):
        found = re.match(r"arguments_(\d{1,3}): ", line)
        if found is not None and int(found[1]) < len(use.tools):
            lines[number] = use.tools[int(found[1])].where
        elif line.startswith("content: "):
            lines[number] = content_field
    return StructureOrigin("tools", lines)


class _Calls:
    """The rule `calls`, and those that it stands on."""

    def __init__(self, use: ToolUse, style: CallStyle, tokenizer: Tokenizer) -> None:
        self._tools: Sequence[Tool] = use.tools
        self._is_parallel = use.is_parallel
        self._tokenizer = tokenizer
        self._style = style

    def lines(self) -> list[str]:
        calls = " | ".join(f"call_{number}" for number in range(len(self._tools)))
        rules = [f"calls: {self._all()}", f"call: {calls}"]
        for number, tool in enumerate(self._tools):
            rules.append(f"call_{number}: {self._one(tool.name, f'arguments_{number}')}")
            rules.append(f"arguments_{number}: {tool.arguments_rule()}")
        return rules

    @property
    def _has_arguments_token(self) -> bool:
        """Newer models of Mistral's write the name before the arguments."""
        return self._style is CallStyle.MISTRAL and self._tokenizer.token_id("[ARGS]") is not None

    def _all(self) -> str:
        match self._style:
            case CallStyle.HERMES:
                return self._many(_quoted("\n"))
            case CallStyle.LLAMA:
                return self._many(_quoted("; "))
            case CallStyle.MISTRAL if self._has_arguments_token:
                return "call+" if self._is_parallel else "call"
            case CallStyle.MISTRAL:
                return f'{self._markup("[TOOL_CALLS]")} "[" {self._many(_quoted(", "))} "]"'

    def _many(self, separator: str) -> str:
        return f"call ({separator} call)*" if self._is_parallel else "call"

    def _one(self, name: str, arguments: str) -> str:
        match self._style:
            case CallStyle.HERMES:
                opening, closing = self._markup("<tool_call>"), self._markup("</tool_call>")
                return f'{opening} "\\n" {_head(name, "arguments")} {arguments} "}}\\n" {closing}'
            case CallStyle.LLAMA:
                # Nothing tells a call from an answer that is JSON as well. So it is written in the pieces that JSON is
                # read in: whole, it would win over any other object that begins like it.
                name = _quoted(json.dumps(name))
                return rf'"{{" "\"name\"" ": " {name} ", " "\"parameters\"" ": " {arguments} "}}"'
            case CallStyle.MISTRAL if self._has_arguments_token:
                return f"{self._markup('[TOOL_CALLS]')} {_quoted(name)} {self._markup('[ARGS]')} {arguments}"
            case CallStyle.MISTRAL:
                return f'{_head(name, "arguments")} {arguments} "}}"'

    def _markup(self, text: str) -> str:
        """A special token cannot be written by its characters: only by its number."""
        token_id = self._tokenizer.token_id(text)
        return f"<[{token_id}]>" if token_id in self._tokenizer.special_token_ids else _quoted(text)


def _head(name: str, key: str) -> str:
    """A call as JSON, up to its arguments."""
    return _quoted(f'{{"name": {json.dumps(name)}, "{key}": ')


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

"""The grammar of a text that must be a call.

It is written so that nothing but the arguments is the model's choice: no white space outside of strings, in which a
small model could lose itself. The schemas stand in it one by one, so that a reference within one means what it says.
"""

import json

from cluster.tools.tool_use import ToolMode, ToolUse
from engine.structure.spec import Structure, StructureKind


def call_structure(use: ToolUse) -> Structure | None:
    """What the text is held to, for `NamedCallParser` or `RequiredCallParser`; none, where the model is free."""
    match use.mode:
        case ToolMode.NAMED:
            assert use.named is not None, "a call of one function names it"
            return _grammar([f"start: {use.named.arguments_rule()}"])
        case ToolMode.REQUIRED:
            more = ' (", " call)*' if use.is_parallel else ""
            lines = [
                f'start: "[" call{more} "]"',
                "call: " + " | ".join(f"call_{number}" for number in range(len(use.tools))),
            ]
            for number, tool in enumerate(use.tools):
                head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "parameters": ')
                lines.append(f'call_{number}: {head} arguments_{number} "}}"')
                lines.append(f"arguments_{number}: {tool.arguments_rule()}")
            return _grammar(lines)
    return None


def _grammar(lines: list[str]) -> Structure:
    return Structure(StructureKind.GRAMMAR, "\n".join(lines))

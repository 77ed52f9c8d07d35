"""What the parsers of calls find in a text, in a form to compare."""

from collections.abc import Sequence

from cluster.tools.call_parser import call_parser
from cluster.tools.call_pieces import CallArguments, CallStart, Content, Piece
from cluster.tools.call_style import CallStyle
from cluster.tools.tool import Tool
from cluster.tools.tool_use import ToolMode, ToolUse

TOOLS = (Tool("weather", {"type": "object"}), Tool("time", {"type": "object"}))


def parse(kind: str, *texts: str, is_parallel: bool = True) -> list[Piece]:
    """The pieces of a text that comes in `texts`."""
    mode = {"required": ToolMode.REQUIRED, "named": ToolMode.NAMED}.get(kind, ToolMode.AUTO)
    style = CallStyle(kind) if mode is ToolMode.AUTO else CallStyle.HERMES
    parser = call_parser(ToolUse(mode, TOOLS, TOOLS[0], is_parallel=is_parallel), style)
    assert parser is not None
    pieces = [piece for text in texts for piece in parser.push(text)]
    return joined_pieces(pieces + parser.flush())


def joined_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces, with those that follow each other joined: how they were cut is gone."""
    joined: list[Piece] = []
    for piece in pieces:
        match (joined[-1] if joined else None, piece):
            case (Content(before), Content(text)):
                joined[-1] = Content(before + text)
            case (CallArguments(index, before), CallArguments(other, text)) if index == other:
                joined[-1] = CallArguments(index, before + text)
            case _:
                joined.append(piece)
    return joined


def calls_of(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Each call's name and arguments; a call's pieces stand together, after its start."""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            assert piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return calls


def content_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))

"""From a model's text, as it comes, to what is said and what is called."""

from typing import Protocol

from cluster.tools.call_pieces import Content, Piece, PieceWriter
from cluster.tools.call_style import CallStyle
from cluster.tools.forced_parser import NamedCallParser, RequiredCallParser
from cluster.tools.hermes_parser import hermes_parser
from cluster.tools.llama_parser import LlamaParser
from cluster.tools.mistral_parser import mistral_parser
from cluster.tools.tool_use import ToolMode, ToolUse


class CallParser(Protocol):
    """Takes the text of one message apart. The pieces, joined, do not depend on how the text was cut.

    A call begins when its name is complete. Text that only looked like a call is content, word for word; of a call that
    has begun nothing is: its arguments are what the model wrote, whole or broken off, and what remains of broken markup
    goes nowhere. Nothing raises. The time is in proportion to the text, whatever that is.
    """

    def push(self, text: str) -> list[Piece]:
        """The pieces that this text completes."""
        ...

    def flush(self) -> list[Piece]:
        """The end of the text: the last pieces."""
        ...


def read_calls(parser: CallParser | None, text: str, *, is_last: bool) -> list[Piece]:
    """The pieces that this text completes, of a message that ends with it or goes on.

    Args:
        parser: None: all of the text is content.
    """
    if parser is None:
        return [Content(text)] if text else []
    pieces = parser.push(text)
    return pieces + parser.flush() if is_last else pieces


def call_parser(use: ToolUse, style: CallStyle) -> CallParser | None:
    """The parser of a message; none, if no calls are to be found in it."""
    pieces = PieceWriter(max_calls=None if use.is_parallel else 1)
    match use.mode:
        case ToolMode.NONE:
            return None
        case ToolMode.NAMED:
            assert use.named is not None, "a call of one function names it"
            return NamedCallParser(pieces, use.named.name)
        case ToolMode.REQUIRED:
            return RequiredCallParser(pieces)
    match style:
        case CallStyle.HERMES:
            return hermes_parser(pieces)
        case CallStyle.MISTRAL:
            return mistral_parser(pieces)
        case CallStyle.LLAMA:
            return LlamaParser(pieces, frozenset(tool.name for tool in use.tools))

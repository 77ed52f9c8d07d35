"""Calls as Hermes, Qwen and SmolLM write them.

    I'll look.<tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

Between the tags stands one call, or an array of them. A closing tag that was forgotten is not missed: the next call
begins at its opening tag, and other text is content. Between a call's JSON and its closing tag nothing counts.
"""

from cluster.tools.call_list import CallList
from cluster.tools.call_object import CallObject
from cluster.tools.call_pieces import PieceWriter
from cluster.tools.marked_parser import MarkedParser

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def hermes_parser(pieces: PieceWriter) -> MarkedParser:
    """See the module."""
    return MarkedParser(pieces, lambda: CallList(pieces, _new_object), OPEN, CLOSE)


def _new_object(pieces: PieceWriter) -> CallObject:
    # No JSON has < outside of a string: there the closing tag begins, however many braces are missing.
    return CallObject(pieces, forbidden="<")

"""The assistant's message out of its text: content and calls, in OpenAI's form."""

from collections.abc import Sequence
from typing import Any

from cluster.tools.call_parser import CallParser, read_calls
from cluster.tools.call_pieces import CallArguments, CallStart, Content, Piece, new_call_id

Json = dict[str, Any]


class ChatMessage:
    """One message, as its text comes. `has_calls`: it calls a tool.

    Args:
        parser: finds calls; None: all of the text is content.
    """

    def __init__(self, parser: CallParser | None) -> None:
        self.has_calls = False
        self._parser = parser

    def deltas(self, text: str, *, is_last: bool) -> list[Json]:
        """What this text adds to the message, in order."""
        return [_delta(piece) for piece in self._pieces(text, is_last)]

    def whole(self, text: str) -> Json:
        """The message that is all of `text`."""
        said = ""
        calls: list[Json] = []
        for piece in self._pieces(text, is_last=True):
            match piece:
                case Content(more):
                    said += more
                case CallStart():
                    calls.append(_begun(piece))
                case CallArguments(index, more):
                    calls[index]["function"]["arguments"] += more
        message: Json = {"role": "assistant", "content": said if said or not calls else None, "refusal": None}
        return message | {"tool_calls": calls} if calls else message

    def _pieces(self, text: str, is_last: bool) -> Sequence[Piece]:
        pieces = read_calls(self._parser, text, is_last=is_last)
        self.has_calls = self.has_calls or any(isinstance(piece, CallStart) for piece in pieces)
        return pieces


def _delta(piece: Piece) -> Json:
    match piece:
        case Content(text):
            return {"content": text}
        case CallStart(index):
            return {"tool_calls": [{"index": index} | _begun(piece)]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _begun(call: CallStart) -> Json:
    return {"id": new_call_id(), "type": "function", "function": {"name": call.name, "arguments": ""}}

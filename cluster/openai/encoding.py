"""JSON as replies have it.

The encoder of the standard library keeps the interpreter to itself until a whole value is written, in a thread as well.
So a large reply is written piece by piece (`encode_large`), between which other threads have their turn.
"""

import json
from collections.abc import Iterator
from typing import Any

# Made once: `json.dumps` with such options makes an encoder for each value.
encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

# Elements of a list that are written at once. Of the largest (a token's 20 best with their texts) about 2 ms.
_AT_ONCE = 256
# A reply's choices, and what a choice holds, are walked; lists below them are long, and their elements small.
_WALKED = 3


def encode_large(value: Any) -> bytes:
    """`encode(value)` in UTF-8, by pieces."""
    return b"".join(piece.encode() for piece in _pieces(value, depth=0))


def _pieces(value: Any, depth: int) -> Iterator[str]:
    match value:
        case dict() if depth <= _WALKED:
            yield "{"
            for number, (key, held) in enumerate(value.items()):
                yield f"{',' if number else ''}{encode(key)}:"
                yield from _pieces(held, depth + 1)
            yield "}"
        case list() if depth < _WALKED:
            yield "["
            for number, held in enumerate(value):
                if number:
                    yield ","
                yield from _pieces(held, depth + 1)
            yield "]"
        case list():
            yield "["
            for start in range(0, len(value), _AT_ONCE):
                part = encode(value[start : start + _AT_ONCE])
                yield f",{part[1:-1]}" if start else part[1:-1]
            yield "]"
        case _:
            yield encode(value)

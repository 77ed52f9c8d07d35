"""What each token stands for, in bytes: the ground that decoding, streaming and logprobs share.

Text is the tokens' bytes in a row, read as UTF-8. A vocabulary spells those bytes in one of two ways:

- byte level (GPT-2, Llama 3, Qwen, SmolLM): each byte is written as one printable character;
- SentencePiece (Llama 2, Mistral): plain text with U+2581 for a space, and <0xNN> for a lone byte.
"""

import re
from collections.abc import Callable, Sequence

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_PIECE = "\N{LOWER ONE EIGHTH BLOCK}"


def _byte_level_alphabet() -> dict[str, int]:
    """The 256 characters of byte-level vocabularies: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """A token of a byte-level vocabulary; one with a character outside the alphabet (an added token) is plain text."""
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def sentencepiece_bytes(token: str) -> bytes:
    """A token of a SentencePiece vocabulary."""
    if byte := _BYTE_PIECE.fullmatch(token):
        return bytes((int(byte[1], 16),))
    return token.replace(_SPACE_PIECE, " ").encode("utf-8")


def token_bytes_table(tokens: Sequence[str | None], spell: Callable[[str], bytes]) -> list[bytes]:
    """The bytes of every token id; an id that the vocabulary leaves out stands for nothing."""
    return [b"" if token is None else spell(token) for token in tokens]

"""Where a prompt's tokens stand in its text."""

import codecs
from collections.abc import Sequence

from engine.tokenizer.tokenizer import Tokenizer


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """For each token, at which character of `text` it begins; a part of a character begins where that will stand.

    The text is the caller's, or the tokens' without special ones. So a special token takes room only where the text has
    it: one that was put before the prompt does not, one that the caller wrote out does. The space that SentencePiece
    puts before a text takes none either.
    """
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    offsets: list[int] = []
    at = 0
    for token_id in token_ids:
        offsets.append(at)
        data = tokenizer.token_bytes(token_id)
        if token_id in tokenizer.special_token_ids and not text.startswith(data.decode("utf-8", "replace"), at):
            continue
        piece = utf8.decode(data)
        if at == 0 and piece.startswith(" ") and not text.startswith(" "):
            piece = piece[1:]
        at = min(at + len(piece), len(text))
    return offsets

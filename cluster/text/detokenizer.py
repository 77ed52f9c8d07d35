"""Token ids in, whole characters out.

A token may hold a part of a character only. Its bytes wait here until the character is complete, so that no piece of a
stream ever splits one, and the pieces joined are the text of all tokens decoded at once.
"""

import codecs
from collections.abc import Iterable

from engine.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """Of one sequence, from its first generated token on. It continues the prompt's text; it does not begin a text.

    Args:
        shown: special tokens that are not skipped.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_token_ids.difference(shown) if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete; U+FFFD for bytes that can no longer become one."""
        data = b"".join(self._tokenizer.token_bytes(i) for i in token_ids if i not in self._skip)
        return self._utf8.decode(data) if data else ""

    def flush(self) -> str:
        """The end: a character that was never completed becomes U+FFFD, just as in the text decoded at once."""
        return self._utf8.decode(b"", final=True)

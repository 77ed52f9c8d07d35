"""A model's vocabulary, as llguidance wants it: the bytes of every token, and which of them are no text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llguidance import LLTokenizer, TokenizerWrapper

from engine.tokenizer.tokenizer import Tokenizer

_BYTES = [bytes((byte,)) for byte in range(256)]


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The tokens that are no text: a text ends with some, and a grammar may call them by name, `<|name|>`.

    Raises:
        ValueError: no token ends a text.
    """

    vocab_size: int  # logits of the model: fewer than the tokenizer has tokens, or more
    names: Mapping[int, str]  # by token id
    eos_token_ids: Sequence[int]  # ascending

    def __post_init__(self) -> None:
        if not self.eos_token_ids:
            raise ValueError("the model has no end-of-sequence token: a text held to a structure could not end")

    @staticmethod
    def of(tokenizer: Tokenizer, vocab_size: int) -> "SpecialIds":
        ends = sorted(token_id for token_id in tokenizer.eos_token_ids if 0 <= token_id < vocab_size)
        special = tokenizer.special_token_ids.union(ends)
        names = {token_id: tokenizer.token_text(token_id) for token_id in sorted(special) if token_id < vocab_size}
        return SpecialIds(vocab_size, names, ends)


class _Vocabulary:
    """What `TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: SpecialIds) -> None:
        self.tokens = tokens
        self.special_token_ids = list(special.names)  # never allowed as the text that they are spelled with
        self.eos_token_id = special.eos_token_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        # Asked for how a text that is bound to come would be cut into tokens; see `grammar.py`.
        raise NotImplementedError


def ll_tokenizer(tokenizer: Tokenizer, special: SpecialIds) -> LLTokenizer:
    """Of the model; ids that stand for nothing are never allowed."""
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(special.vocab_size)]
    return _ll_tokenizer(tokens, special)


def byte_tokenizer(special: SpecialIds) -> LLTokenizer:
    """Of the model's special tokens, and of all bytes, from `special.vocab_size` on: small, and writes all texts."""
    tokens = [special.names.get(token_id, "").encode() for token_id in range(special.vocab_size)]
    return _ll_tokenizer(tokens + _BYTES, special)


def _ll_tokenizer(tokens: Sequence[bytes], special: SpecialIds) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, special)), eos_token=list(special.eos_token_ids))

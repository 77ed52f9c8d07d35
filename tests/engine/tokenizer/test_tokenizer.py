"""The tokenizer of the embedded model: golden ids, and an oracle that follows llama.cpp's rules in plain Python."""

import unicodedata
from functools import cache
from itertools import pairwise

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.gguf_file import GGUFFile
from engine.model.locate import EMBEDDED_MODEL, resolve_model
from engine.tokenizer.token_bytes import byte_level_bytes
from gateway_api import embedded_tokenizer

GOLDEN = {
    # Every digit is a token of its own, and the space before a number as well.
    "2024": [34, 32, 34, 36],
    "10 apples cost $3.50": [33, 32, 13855, 1708, 1885, 35, 30, 37, 32],
    "x1y22": [104, 33, 105, 34, 34],
    "½Ⅷ٣": [16738, 173, 223, 117, 164, 113],
    "👋🏽": [10813, 235, 229, 10813, 233, 138],
    "東京は日本の首都です": [
        30679, 126, 16736, 122, 7365, 124, 23274, 115, 40993, 26453, 180, 116, 240, 180, 38466, 7365, 117, 39958,
    ],
    "  two  spaces\n\n\tand a tab \n": [216, 827, 216, 5600, 1116, 197, 397, 253, 10147, 3717],
    "don't": [12420, 982],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
    "": [],
}  # fmt: skip

_GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


@cache
def vocabulary() -> tuple[dict[bytes, int], dict[tuple[bytes, bytes], int]]:
    """Bytes of each token to its id, and each merge to its rank, from the file itself."""
    with GGUFFile(resolve_model(EMBEDDED_MODEL)) as file:
        tokens, merges = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    pairs = [tuple(byte_level_bytes(part) for part in str(line).split(" ")) for line in merges]
    return (
        {byte_level_bytes(str(token)): token_id for token_id, token in enumerate(tokens)},
        {(left, right): rank for rank, (left, right) in enumerate(pairs)},
    )


def oracle_encode(text: str) -> list[int]:
    """Digits apart, then words, then the merges by rank."""
    ids, ranks = vocabulary()
    out = []
    for piece in regex.findall(r"\p{N}|[^\p{N}]+", text):
        for word in _GPT2.findall(piece):
            parts = [bytes((byte,)) for byte in word.encode()]
            while True:
                found = [(ranks[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in ranks]
                if not found:
                    break
                at = min(found)[1]
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            # The vocabulary lacks some bytes that hardly any text has; they are passed over.
            out += [ids[part] for part in parts if part in ids]
    return out


@pytest.mark.parametrize("text", GOLDEN)
def test_embedded_tokenizer_gives_the_golden_ids(text: str) -> None:
    assert embedded_tokenizer().encode(text) == GOLDEN[text]


@pytest.mark.parametrize("text", [text for text in GOLDEN if "<|" not in text])
def test_golden_ids_follow_from_the_rules(text: str) -> None:
    assert oracle_encode(text) == GOLDEN[text]


# Numbers of scripts that Unicode has added lately may be unknown to one library and known to another.
_TEXTS = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cn", "Co")).filter(
        lambda character: unicodedata.category(character)[0] != "N" or ord(character) < 0x3000
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(_TEXTS | st.text(" \n\t'adehlrstv01234567890.,!", max_size=40))
def test_encoding_equals_the_oracle_when_text_is_random(text: str) -> None:
    tokenizer = embedded_tokenizer()
    ids = tokenizer.encode(text)
    assert ids == oracle_encode(text)
    known = set().union(*(token for token in vocabulary()[0] if len(token) == 1))
    if known.issuperset(text.encode()):
        assert tokenizer.decode(ids) == text


def test_no_beginning_of_sequence_is_put_before_a_text() -> None:
    tokenizer = embedded_tokenizer()
    assert tokenizer.encode("Hi", add_special_tokens=True) == tokenizer.encode("Hi", add_special_tokens=False)


def test_special_tokens_are_those_of_the_file() -> None:
    tokenizer = embedded_tokenizer()
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == {tokenizer.token_id("<|im_end|>")} == {2}
    assert tokenizer.special_token_ids == set(range(17))
    assert tokenizer.special.names["eos_token"] == "<|im_end|>"


def test_special_tokens_are_left_out_of_text_unless_asked_for() -> None:
    tokenizer = embedded_tokenizer()
    ids = tokenizer.encode("Hi<|im_end|>")
    assert tokenizer.decode(ids) == "Hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Hi<|im_end|>"


def test_decoding_equals_the_library_for_every_token() -> None:
    tokenizer = embedded_tokenizer()
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.decode([token_id]) == tokenizer._encoder.decode([token_id])


def test_ids_beyond_the_vocabulary_stand_for_nothing() -> None:
    tokenizer = embedded_tokenizer()
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        embedded_tokenizer().encode("a\ud800b")

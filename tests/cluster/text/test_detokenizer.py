"""A stream of tokens and the whole of them give the same text, and no piece splits a character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.text.detokenizer import Detokenizer
from gateway_api import embedded_tokenizer

_IDS = st.lists(st.integers(0, 49151), max_size=40)
# Ids of single bytes and other parts of characters, which random ids seldom are.
_PARTS = [i for i in range(49152) if b"\xef\xbf\xbd" in embedded_tokenizer().token_text(i).encode()]


@settings(max_examples=300, deadline=None)
@given(_IDS | st.lists(st.sampled_from(_PARTS) | st.integers(0, 300), max_size=40), st.booleans(), st.data())
def test_streamed_text_equals_the_decoded_whole_for_random_tokens(
    ids: list[int], skip_special_tokens: bool, data: st.DataObject
) -> None:
    tokenizer = embedded_tokenizer()
    whole = tokenizer._encoder.decode(ids, skip_special_tokens=skip_special_tokens)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    pieces = []
    rest = ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(detokenizer.push(rest[:size]))
        rest = rest[size:]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == whole == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cn", "Co")), max_size=30))
def test_no_piece_holds_a_part_of_a_character_when_text_is_valid(text: str) -> None:
    tokenizer = embedded_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text)
    pieces = [detokenizer.push([token_id]) for token_id in ids] + [detokenizer.flush()]
    if tokenizer.decode(ids) == text:  # else it has bytes that the vocabulary lacks
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces).replace("\ufffd", "", text.count("\ufffd"))


def test_emoji_leaves_when_its_last_byte_is_there() -> None:
    tokenizer = embedded_tokenizer()
    ids = tokenizer.encode("🍜")
    assert len(ids) == 3
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token_id]) for token_id in ids] == ["", "", "🍜"]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("length", [1, 2])
def test_character_that_is_cut_off_becomes_one_replacement_at_the_end(length: int) -> None:
    tokenizer = embedded_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("🍜")[:length]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_token_inside_a_character_does_not_break_it() -> None:
    tokenizer = embedded_tokenizer()
    first, second, third = tokenizer.encode("🍜")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([first, second, 2, third]) == "🍜"


def test_special_tokens_that_are_to_be_shown_are_not_skipped() -> None:
    tokenizer = embedded_tokenizer()
    tokens = tokenizer.encode("a<|im_start|>b<|im_end|>c")
    assert Detokenizer(tokenizer, shown=(1,)).push(tokens) == "a<|im_start|>bc"
    assert Detokenizer(tokenizer, shown=(1,), skip_special_tokens=False).push(tokens) == "a<|im_start|>b<|im_end|>c"

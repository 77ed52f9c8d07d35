"""What a matcher allows, against languages that are written out in full."""

import json
import logging
import re
from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.structure.matcher import CompiledStructure
from engine.structure.spec import StructureKind
from engine.tokenizer.tokenizer import Tokenizer
from structured import BYTES, allowed_ids, byte_tokenizer, compiled, written


@cache
def tiny() -> Tokenizer:
    """Eleven tokens, three of them no text; two end one."""
    return byte_tokenizer(
        [b"a", b"b", b"ab", b"ba", b"aab", b"bb", b"abba", b"c"], {0: "<eos>", 4: "bbb", 9: "<end>"}, (0, 9)
    )


@cache
def all_bytes() -> Tokenizer:
    return byte_tokenizer([*BYTES, b'{"', b'": ', b'", "', b"ab", "é".encode(), "é".encode()[1:] + b"a", b"true}"])


def expected_ids(tokenizer: Tokenizer, begins: Callable[[bytes], bool], is_whole: bool, so_far: bytes) -> list[int]:
    """By asking of each token whether a text begins so."""
    ids = set(tokenizer.eos_token_ids) if is_whole else set()
    for token_id in set(range(tokenizer.vocab_size)) - tokenizer.special_token_ids:
        if begins(so_far + tokenizer.token_bytes(token_id)):
            ids.add(token_id)
    return sorted(ids)


# --- regular expressions, by Python's own

_LONGEST = 10
_TEXTS = ["".join(letters) for n in range(_LONGEST + 1) for letters in product("ab", repeat=n)]

atoms = st.sampled_from(["a", "b", "[ab]", "."])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{1,2}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=4,
)


@given(pattern=patterns)
@settings(max_examples=60, deadline=None)
def test_what_a_regex_allows_is_what_begins_a_match(pattern: str) -> None:
    whole = {text.encode() for text in _TEXTS if re.fullmatch(pattern, text)}
    # A match is completed by as many letters as the pattern has at most, and here texts begin with four.
    begun = {text[:n] for text in whole for n in range(len(text) + 1)}
    structure = compiled(StructureKind.REGEX, pattern, tiny())
    waiting: list[list[int]] = [[]]
    num_seen = 0
    for output in waiting:
        so_far = b"".join(tiny().token_bytes(token_id) for token_id in output)
        if len(so_far) > 2:
            continue
        ids = allowed_ids(structure.matcher(), output)
        # "c" is in no text of ours; `.` allows it.
        assert [i for i in ids if b"c" not in tiny().token_bytes(i)] == expected_ids(
            tiny(), begun.__contains__, so_far in whole, so_far
        )
        num_seen += 1
        waiting += [[*output, i] for i in ids if i not in tiny().eos_token_ids and b"c" not in tiny().token_bytes(i)]
    assert num_seen > 0


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("^a|b$", "a", True),
        ("a/b", "a/b", True),
        ("a\nb", "a\nb", True),
        (".", "\n", False),
        (".", "\N{GRINNING FACE}", True),
        (r"\d{2}", "12", True),
        (r"(?i)yes", "YeS", True),
        (r"[^\x00-\x7f]", "é", True),
        ("", "", True),
    ],
)
def test_a_regex_is_matched_by_the_whole_text(pattern: str, text: str, matches: bool) -> None:
    matcher = compiled(StructureKind.REGEX, pattern, all_bytes()).matcher()
    output = list[int]()
    for byte in text.encode():
        token_id = byte + 1
        if token_id not in allowed_ids(matcher, output):
            assert not matches
            return
        output.append(token_id)
    assert (0 in allowed_ids(matcher, output)) == matches


# --- choices, by membership

choices = st.lists(
    st.one_of(st.text("ab", max_size=4), st.text(st.characters(codec="utf-8"), max_size=4)), min_size=1, max_size=5
)


@given(strings=choices, seed=st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_a_choice_allows_exactly_what_begins_one_of_its_strings(strings: list[str], seed: int) -> None:
    whole = {string.encode() for string in strings}
    begun = {text[:n] for text in whole for n in range(len(text) + 1)}
    matcher = compiled(StructureKind.CHOICE, json.dumps(strings), all_bytes()).matcher()
    output, has_ended = written(matcher, all_bytes(), seed, max_tokens=100)
    assert has_ended
    assert b"".join(all_bytes().token_bytes(i) for i in output[:-1]) in whole
    for n in range(len(output)):
        so_far = b"".join(all_bytes().token_bytes(i) for i in output[:n])
        assert allowed_ids(matcher, output[:n]) == expected_ids(
            all_bytes(), begun.__contains__, so_far in whole, so_far
        )


def test_a_choice_is_taken_literally() -> None:
    for text in ('"\\/#|*', "%json {}", "<eos>", "\x00\x1b\x7f\x85\u2028\ufeff", "\n", " "):
        matcher = compiled(StructureKind.CHOICE, json.dumps([text]), all_bytes()).matcher()
        output = [byte + 1 for byte in text.encode()]
        for n in range(len(output)):
            assert output[n] in allowed_ids(matcher, output[:n])
        assert allowed_ids(matcher, output) == [0]


# --- tokens


def test_a_character_may_come_in_several_tokens() -> None:
    matcher = compiled(StructureKind.CHOICE, '["é", "è"]', all_bytes()).matcher()
    whole = next(i for i in range(all_bytes().vocab_size) if all_bytes().token_bytes(i) == "é".encode())
    first, second, other = (byte + 1 for byte in b"\xc3\xa9\xa8")
    assert allowed_ids(matcher, []) == [first, whole]
    assert allowed_ids(matcher, [first]) == sorted([second, other])
    assert allowed_ids(matcher, [first, second]) == allowed_ids(matcher, [whole]) == [0]


def test_special_tokens_are_never_written_as_text() -> None:
    assert tiny().token_bytes(4) == b"bbb"
    matcher = compiled(StructureKind.REGEX, "[ab<>eosn]*", tiny()).matcher()
    assert allowed_ids(matcher, []) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_a_grammar_may_call_special_tokens_by_name() -> None:
    tokenizer = byte_tokenizer([*BYTES], {0: "<eos>", 7: "<tool>"})
    matcher = compiled(StructureKind.GRAMMAR, 'start: <tool> "x"', tokenizer).matcher()
    assert allowed_ids(matcher, []) == [7]
    assert [tokenizer.token_bytes(i) for i in allowed_ids(matcher, [7])] == [b"x"]


@pytest.mark.parametrize("vocab_size", [9, 10, 11, 31, 32, 33, 100])
def test_the_mask_is_as_large_as_the_models_vocabulary(vocab_size: int) -> None:
    matcher = compiled(StructureKind.REGEX, "[ab]*", tiny(), vocab_size).matcher()
    assert len(matcher.allowed([])) == -(-vocab_size // 32)
    # Ids without a token are never allowed, tokens that the model cannot say neither.
    assert allowed_ids(matcher, []) == [i for i in [0, 1, 2, 3, 5, 6, 7, 8, 9] if i < vocab_size]


def test_a_text_ends_by_any_end_of_sequence_token_and_by_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    matcher = compiled(StructureKind.REGEX, "ab?", tiny()).matcher()
    assert allowed_ids(matcher, []) == [1, 3]
    assert allowed_ids(matcher, [1]) == [0, 2, 9]
    assert allowed_ids(matcher, [1, 2]) == [0, 9]
    # Behind the end, as far as `min_tokens` drives it.
    assert allowed_ids(matcher, [1, 9]) == [0, 9]
    assert allowed_ids(matcher, [1, 9, 0]) == [0, 9]
    assert not caplog.records  # nothing was given up


# --- a function of the tokens alone

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "tags": {"type": "array", "items": {"enum": ["a", "ab", "é"]}, "maxItems": 3},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    }
)
FOLLOWED = {
    "schema": (StructureKind.JSON_SCHEMA, SCHEMA),
    "object": (StructureKind.JSON_OBJECT, ""),
    "regex": (StructureKind.REGEX, r"(\w+ ?){1,20}[.!]"),
    "choice": (StructureKind.CHOICE, '["abab", "ab", "abé", ""]'),
    "grammar": (StructureKind.GRAMMAR, 'start: "(" start* ")" | "ab"+'),
}


@cache
def followed(name: str) -> CompiledStructure:
    return compiled(*FOLLOWED[name], all_bytes())


@pytest.mark.parametrize("name", FOLLOWED)
@pytest.mark.parametrize("seed", range(4))
def test_a_new_matcher_that_is_told_the_text_so_far_allows_the_same(name: str, seed: int) -> None:
    """After a preemption, on another worker, behind a prefill worker's first token."""
    old = followed(name).matcher()
    output, _ = written(old, all_bytes(), seed, max_tokens=120, signs=b'"}])')
    masks = [followed(name).matcher().allowed(output[:n]).tobytes() for n in range(len(output) + 1)]
    again = followed(name).matcher()
    assert [again.allowed(output[:n]).tobytes() for n in range(len(output) + 1)] == masks
    # And one that has missed some steps.
    assert [again.allowed(output[:n]).tobytes() for n in range(0, len(output) + 1, 3)] == masks[::3]


@given(texts=st.lists(st.tuples(st.sampled_from(range(4)), st.integers(0, 60)), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_a_matcher_that_is_told_another_text_starts_afresh(texts: list[tuple[int, int]]) -> None:
    matcher = followed("schema").matcher()
    for seed, length in texts:
        output = written(followed("schema").matcher(), all_bytes(), seed, max_tokens=60)[0][:length]
        assert matcher.allowed(output).tobytes() == followed("schema").matcher().allowed(output).tobytes()


def test_the_text_may_be_any_sequence_and_grow_in_place() -> None:
    matcher, output = followed("object").matcher(), list[int]()
    first = matcher.allowed(output)
    assert matcher.allowed(()).tobytes() == first.tobytes()
    output.append(allowed_ids(matcher, output)[0])
    grown = matcher.allowed(output)
    assert grown.tobytes() != first.tobytes()
    assert matcher.allowed(tuple(output)).tobytes() == grown.tobytes()


# --- texts that are given up


def too_many_properties() -> CompiledStructure:
    properties = {f"p{i}": {"type": "string"} for i in range(2000)}
    return compiled(StructureKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": properties}), all_bytes())


def test_a_text_that_becomes_too_complex_may_only_end(caplog: pytest.LogCaptureFixture) -> None:
    structure = too_many_properties()
    with caplog.at_level(logging.WARNING):
        for matcher in (structure.matcher(), structure.matcher()):
            output = list[int]()
            while 0 not in (ids := allowed_ids(matcher, output)):
                assert len(output) < 20
                output.append(ids[0])
            assert ids == [0]
            assert allowed_ids(matcher, [*output, 0]) == [0]
            assert matcher.has_given_up
            assert allowed_ids(matcher, output) == [0]  # told it again, it comes to the same
            assert matcher.has_given_up
            allowed_ids(matcher, [])
            assert not matcher.has_given_up
    [record] = caplog.records  # once a structure
    assert "was ended early" in record.message
    assert "items" in record.message


@pytest.mark.parametrize("wrong", [[98], [99, 1, 99], [256], [10**6], [99, 10**6]])
def test_after_tokens_that_were_not_allowed_a_text_may_only_end(
    wrong: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    matcher = compiled(StructureKind.REGEX, "b+", all_bytes()).matcher()
    assert allowed_ids(matcher, [99]) == [0, 99]
    assert not matcher.has_given_up
    assert allowed_ids(matcher, wrong) == [0]
    assert "was ended early" in caplog.text
    assert matcher.has_given_up
    assert allowed_ids(matcher, [99]) == [0, 99]  # another text is another matter
    assert not matcher.has_given_up


def test_where_no_token_goes_on_a_text_may_only_end(caplog: pytest.LogCaptureFixture) -> None:
    matcher = compiled(StructureKind.REGEX, "ax", tiny()).matcher()  # nobody says x
    assert allowed_ids(matcher, []) == [1]
    assert allowed_ids(matcher, [1]) == [0, 9]
    assert "was ended early" in caplog.text
    assert matcher.has_given_up


def test_a_text_that_has_ended_is_not_given_up() -> None:
    matcher = compiled(StructureKind.REGEX, "b", all_bytes()).matcher()
    assert allowed_ids(matcher, [99]) == [0]
    assert not matcher.has_given_up
    assert allowed_ids(matcher, [99, 0]) == [0]
    assert not matcher.has_given_up

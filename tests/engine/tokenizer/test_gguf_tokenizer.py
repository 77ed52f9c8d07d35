"""Tokenizers out of GGUF files that are written here."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.errors import ModelLoadError
from engine.tokenizer.gguf_tokenizer import load_gguf_tokenizer
from engine.tokenizer.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write(path: Path, **metadata: Any) -> Path:
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ALPHABET = [*"abcdehlorstw0123456789'.", "Ġ", "Ċ", "ĉ"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3", "Ċ Ċ", "' s", "Ġ Ġ"]
TOKENS = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "<s>", "<e>", "<turn>", "<user>"]


def byte_level(path: Path, pre: str, **metadata: Any) -> Path:
    kinds = [NORMAL] * (len(TOKENS) - 4) + [CONTROL] * 3 + [USER_DEFINED]
    ids = {token: token_id for token_id, token in enumerate(TOKENS)}
    return write(
        path,
        **{
            "model": "gpt2",
            "pre": pre,
            "tokens": TOKENS,
            "token_type": kinds,
            "merges": MERGES,
            "bos_token_id": ids["<s>"],
            "eos_token_id": ids["<e>"],
            "eot_token_id": ids["<turn>"],
            **metadata,
        },
    )


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("gpt-2", "hello 123", ["hello", "Ġ", "123"]),
        ("smollm", "hello 123", ["hello", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "hello 1231", ["<s>", "hello", "Ġ", "123", "1"]),
        ("qwen2", "hello 123", ["hello", "Ġ", "1", "2", "3"]),
        ("gpt-2", "  w", ["Ġ", "Ġw"]),
        ("qwen2", "\n\n w", ["ĊĊ", "Ġw"]),
        ("gpt-2", "hello's", ["hello", "'s"]),
    ],
)
def test_text_is_cut_by_the_rule_that_the_file_names(
    tmp_path: Path, pre: str, text: str, tokens: Sequence[str]
) -> None:
    tokenizer = load_gguf_tokenizer(byte_level(tmp_path / "m.gguf", pre))
    ids = tokenizer.encode(text)
    assert tokenizer.raw_tokens(ids) == tokens
    assert tokenizer.decode(ids) == text


def test_special_tokens_come_from_the_file(tmp_path: Path) -> None:
    tokenizer = load_gguf_tokenizer(byte_level(tmp_path / "m.gguf", "gpt-2"))
    assert tokenizer.raw_tokens(sorted(tokenizer.eos_token_ids)) == ["<e>", "<turn>"]
    assert tokenizer.raw_tokens(sorted(tokenizer.special_token_ids)) == ["<s>", "<e>", "<turn>"]
    ids = tokenizer.encode("a<turn>b<user>c")
    assert tokenizer.raw_tokens(ids) == ["a", "<turn>", "b", "<user>", "c"]
    assert tokenizer.decode(ids) == "ab<user>c"


@pytest.mark.parametrize(("add_bos", "first"), [(True, "<s>"), (False, "a")])
def test_beginning_of_sequence_is_added_only_if_the_file_says_so(tmp_path: Path, add_bos: bool, first: str) -> None:
    tokenizer = load_gguf_tokenizer(byte_level(tmp_path / "m.gguf", "gpt-2", add_bos_token=add_bos))
    assert tokenizer.raw_tokens(tokenizer.encode("ab"))[0] == first
    assert tokenizer.raw_tokens(tokenizer.encode("ab", add_special_tokens=False)) == ["a", "b"]


def test_unknown_rule_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'tekken'.*smollm, gpt-2, llama-bpe and qwen2"):
        load_gguf_tokenizer(byte_level(tmp_path / "m.gguf", "tekken"))


def test_merges_that_do_not_fit_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="merges does not fit"):
        load_gguf_tokenizer(byte_level(tmp_path / "m.gguf", "gpt-2", merges=["x y"]))


def test_unknown_kind_of_tokenizer_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kind 't5'"):
        load_gguf_tokenizer(byte_level(tmp_path / "m.gguf", "gpt-2", model="t5"))


def test_file_without_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks tokenizer\.ggml\.tokens"):
        load_gguf_tokenizer(write(tmp_path / "m.gguf", model="gpt2", pre="gpt-2"))


def test_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "m.gguf", "gpt-2")
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ModelLoadError):
        load_gguf_tokenizer(path)


# --- SentencePiece

PIECES = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
PIECES += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
PIECES += [
    (piece, -float(rank), NORMAL)
    for rank, piece in enumerate(
        ["▁a", "ab", "▁ab", "ba", "aba", "▁b", "bab", "cc", "abab", "▁▁", "▁c", "bb", "▁", "a", "b", "c"]
    )
]


def sentencepiece(path: Path, **metadata: Any) -> Tokenizer:
    tokens, scores, kinds = zip(*PIECES, strict=True)
    return load_gguf_tokenizer(
        write(
            path,
            **{
                "model": "llama",
                "tokens": list(tokens),
                "scores": list(scores),
                "token_type": list(kinds),
                "unknown_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                **metadata,
            },
        )
    )


def oracle_pieces(text: str) -> list[str]:
    """SentencePiece's rule read plainly: join the best-scored neighbours, the leftmost of equals, until none fits."""
    scores = {piece: score for piece, score, kind in PIECES if kind == NORMAL}
    parts = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        joints = [(-scores[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not joints:
            break
        at = min(joints)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        out
        for part in parts
        for out in ([part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()])
    ]  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece(tmp_path_factory.mktemp("sentencepiece") / "m.gguf")


@settings(deadline=None)
@given(st.text("abc é", max_size=20))
def test_sentencepiece_encoding_equals_the_oracle(llama: Tokenizer, text: str) -> None:
    ids = llama.encode(text)
    assert llama.raw_tokens(ids) == ["<s>", *oracle_pieces(text)]
    assert llama.decode(ids) == text


def test_sentencepiece_bytes_are_joined_into_characters(llama: Tokenizer) -> None:
    ids = llama.encode("é🍜", add_special_tokens=False)
    assert llama.raw_tokens(ids)[-6:] == ["<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x8D>", "<0x9C>"]
    assert llama.decode(ids) == "é🍜"
    assert llama.token_bytes(ids[-1]) == b"\x9c"


def test_sentencepiece_adds_no_space_when_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False)
    assert tokenizer.raw_tokens(tokenizer.encode("ab c")) == ["ab", "▁c"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"

"""Names of blocks: equal in every process, different for whatever differs."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kvcache.block_hash import extend_hashes, hash_block, hash_blocks, root_hash

ROOT = root_hash(b"f" * 16)
token_ids = st.integers(0, 2**31 - 1)


def test_hash_is_16_bytes_when_root_or_block():
    assert len(ROOT) == 16
    assert len(hash_block(ROOT, [1, 2, 3])) == 16


def test_only_full_blocks_are_named_when_sequence_is_hashed():
    assert hash_blocks(ROOT, range(15), 16) == []
    assert len(hash_blocks(ROOT, range(16), 16)) == 1
    assert len(hash_blocks(ROOT, range(33), 16)) == 2


def test_chain_is_hash_of_parent_and_tokens_when_computed_at_once():
    first = hash_block(ROOT, [1, 2])
    assert hash_blocks(ROOT, [1, 2, 3, 4], 2) == [first, hash_block(first, [3, 4])]


@given(st.lists(token_ids, max_size=40), st.integers(1, 7), st.data())
def test_incremental_hashes_equal_those_at_once_when_sequence_grows(tokens, block_size, data):
    hashes = []
    length = 0
    while length < len(tokens):
        length = data.draw(st.integers(length + 1, len(tokens)))
        extend_hashes(hashes, ROOT, tokens[:length], block_size)
    assert hashes == hash_blocks(ROOT, tokens, block_size)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 12], [11, 2]),  # digits in a row would be equal
        ([5, 0], [0, 5]),
        ([2**31 - 1, 0], [0, 2**31 - 1]),
        ([1, 1], [1, 2]),  # the last token
        ([-1], [-2]),  # equal under Python's hash
    ],
)
def test_hashes_differ_when_tokens_do(one, other):
    assert hash_block(ROOT, one) != hash_block(ROOT, other)


def test_hashes_differ_when_only_the_parent_does():
    assert hash_block(hash_block(ROOT, [1]), [3]) != hash_block(hash_block(ROOT, [2]), [3])


def test_roots_differ_when_fingerprint_salt_or_lora_does():
    parts = [(b"ab", "", ""), (b"a", "b", ""), (b"a", "", "b"), (b"", "ab", ""), (b"", "a", "b"), (b"", "", "ab")]
    assert len({root_hash(*part) for part in parts}) == len(parts)


def test_root_is_no_block_when_salt_is_made_to_look_like_one():
    assert root_hash(b"", ROOT.decode("latin-1")) != hash_block(ROOT, [])


@pytest.mark.parametrize("token_id", [2**31, -(2**31) - 1])
def test_token_id_is_refused_when_it_is_no_32_bit_integer(token_id):
    with pytest.raises(ValueError, match="32-bit"):
        hash_block(ROOT, [token_id])


def test_hash_is_the_same_when_computed_in_processes_of_other_hash_seeds():
    code = (
        "from engine.kvcache.block_hash import hash_blocks, root_hash;"
        "print(hash_blocks(root_hash(b'model', 'tenant'), range(32), 16)[-1].hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[3],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    # The very value is fixed, too: gateways and workers of different releases must agree, or say that they do not.
    assert printed == {"72dee5808d38b90d95da7e4817704590"}
    assert printed == {hash_blocks(root_hash(b"model", "tenant"), range(32), 16)[-1].hex()}

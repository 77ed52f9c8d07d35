"""The name of a full block's content: a hash over its tokens and, through its parent's hash, over all before them.

Gateway and workers compute the same names from tokens alone, in any process, so a keyed hash over a fixed encoding is
used, never Python's `hash`. The root covers everything beside tokens that the KV depends on, or that must keep tenants
apart: model and layout (the fingerprint), LoRA and `cache_salt`.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)  # 16 bytes

HASH_SIZE = 16
_KEY = b"tandem.kv-cache.block-hash.v1"
# Roots and blocks are hashed as different "persons": no salt can be chosen to look like a block.
_ROOT_PERSON = b"root"
_BLOCK_PERSON = b"block"
_BLOCK_HASHER = hashlib.blake2b(digest_size=HASH_SIZE, key=_KEY, person=_BLOCK_PERSON)


def root_hash(fingerprint: bytes, cache_salt: str = "", lora: str = "") -> BlockHash:
    """The parent of every first block."""
    hasher = hashlib.blake2b(digest_size=HASH_SIZE, key=_KEY, person=_ROOT_PERSON)
    for part in (fingerprint, cache_salt.encode("utf-8", "surrogatepass"), lora.encode("utf-8", "surrogatepass")):
        hasher.update(struct.pack("<Q", len(part)))  # so that ("ab", "c") is not ("a", "bc")
        hasher.update(part)
    return BlockHash(hasher.digest())


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The name of the block of `token_ids` that follows the block named `parent`.

    Raises:
        ValueError: a token id that is no 32-bit integer.
    """
    return _hash_packed(parent, _pack(token_ids))


def hash_blocks(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Names of all full blocks of a sequence, in order."""
    hashes: list[BlockHash] = []
    extend_hashes(hashes, root, token_ids, block_size)
    return hashes


def extend_hashes(hashes: list[BlockHash], root: BlockHash, token_ids: Sequence[int], block_size: int) -> None:
    """Appends the names of the full blocks that are missing in `hashes`, the names of the leading ones.

    For a growing sequence: costs only what is new.
    """
    first, end = len(hashes), len(token_ids) // block_size
    if first >= end:
        return
    packed = _pack(token_ids[first * block_size : end * block_size])
    num_bytes = 4 * block_size
    parent = hashes[-1] if hashes else root
    for start in range(0, len(packed), num_bytes):
        parent = _hash_packed(parent, packed[start : start + num_bytes])
        hashes.append(parent)


def split_hashes(joined: bytes) -> tuple[BlockHash, ...]:
    """Hashes that were written one behind the other, as they cross the wire.

    Raises:
        ValueError: not a whole number of hashes.
    """
    if len(joined) % HASH_SIZE:
        raise ValueError(f"{len(joined)} bytes are not a whole number of {HASH_SIZE}-byte block hashes")
    return tuple(BlockHash(joined[i : i + HASH_SIZE]) for i in range(0, len(joined), HASH_SIZE))


def _pack(token_ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(token_ids)}i", *token_ids)
    except struct.error as exc:
        raise ValueError(f"a token id is no 32-bit integer: {exc}") from exc


def _hash_packed(parent: BlockHash, packed: bytes) -> BlockHash:
    hasher = _BLOCK_HASHER.copy()  # the key is taken in once
    hasher.update(parent + packed)
    return BlockHash(hasher.digest())

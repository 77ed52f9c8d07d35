"""Registered blocks: one copy of a content, and several."""

import gc

from engine.kvcache.block import KVCacheBlock
from engine.kvcache.block_hash import hash_block, root_hash
from engine.kvcache.registered import RegisteredBlocks

A, B = (hash_block(root_hash(b"f" * 16), [token]) for token in (1, 2))


def test_first_and_last_copies_are_told():
    first, second, third = (KVCacheBlock(i) for i in range(1, 4))
    registered = RegisteredBlocks()
    assert [registered.add(A, block) for block in (first, second, third)] == [True, False, False]
    assert registered.add(B, KVCacheBlock(4))
    assert registered.copies(A) == [first, second, third]
    assert [registered.remove(A, block) for block in (first, third, second)] == [False, False, True]
    assert A not in registered
    assert registered.copies(A) == []
    assert list(registered) == [B]


def test_a_content_may_come_back_after_its_copies_are_gone():
    first, second = KVCacheBlock(1), KVCacheBlock(2)
    registered = RegisteredBlocks()
    registered.add(A, first)
    registered.add(A, second)
    registered.remove(A, first)
    assert not registered.add(A, first), "the second copy is there"
    assert registered.copies(A) == [second, first]


def test_a_content_of_one_copy_is_no_object_that_is_collected():
    registered = RegisteredBlocks()
    blocks = [KVCacheBlock(i) for i in range(1, 101)]
    hashes = [hash_block(A, [i]) for i in range(100)]
    gc.collect()
    before = len(gc.get_objects())
    for block_hash, block in zip(hashes, blocks, strict=True):
        registered.add(block_hash, block)
    assert len(gc.get_objects()) - before < 10

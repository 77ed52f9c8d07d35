"""A hypothesis machine drives the pool at random, in any order that holders could let go, against a ten-line model."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kvcache.block_hash import hash_blocks, root_hash
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.events import BlocksRemoved, BlocksStored

ROOT = root_hash(b"f" * 16)
sequences = st.lists(st.integers(0, 1), min_size=1, max_size=5)  # two tokens: prefixes are shared often


class PoolMachine(RuleBasedStateMachine):
    """The model: who holds what (`held`), what was written where (`content`), whose parent is whose (`parents`)."""

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.held = Counter()  # block id -> references
        self.content = {}  # block id -> hash registered for it since it was last given out
        self.parents = {}  # hash -> its parent's
        self.growing = []  # (table, hashes, number of registered ones) of "requests"
        self.directory = set()  # what a subscriber of the events knows

    def holders(self):
        """Active by the model: held, or before something active in its chain."""
        active = {block_id for block_id, count in self.held.items() if count}
        for block_id in list(active):
            parent = self.pool.blocks[block_id].parent
            while parent is not None:
                active.add(parent.block_id)
                parent = parent.parent
        return active

    @rule(tokens=sequences)
    def begin(self, tokens):
        hashes = hash_blocks(ROOT, tokens, 1)
        self.parents.update(zip(hashes, [None, *hashes], strict=False))
        num_cached = sum(self.pool.is_cached(block_hash) for block_hash in hashes)
        chain = self.pool.cached_chain(hashes[num_cached - 1]) if num_cached else []
        assert [self.content[block_id] for block_id in chain] == hashes[:num_cached]
        assert self.pool.num_inactive(chain) == len(set(chain) - self.holders())
        self.pool.take(chain)
        self.held.update(chain)
        num_available = self.pool.num_usable_blocks - len(self.holders())
        rest = self.pool.allocate(len(tokens) - num_cached)
        assert (rest is None) == (len(tokens) - num_cached > num_available)
        if rest is None:
            self.pool.free(chain)
            self.held.subtract(chain)
            return
        assert not any(self.held[block_id] for block_id in rest)
        assert len(set(rest)) == len(rest)
        for block_id in rest:
            self.content.pop(block_id, None)
        self.held.update(rest)
        self.growing.append([chain + rest, hashes, num_cached])

    @precondition(lambda self: self.growing)
    @rule(data=st.data())
    def register_next(self, data):
        request = data.draw(st.sampled_from(self.growing))
        table, hashes, index = request
        if index == len(table) or self.held[table[index]] == 0:
            return
        if index and self.content.get(table[index - 1]) != hashes[index - 1]:
            return  # its head was let go of and given to others: a real request would not
        if index and table[index - 1] not in self.holders():
            return
        if table[index] in self.content:
            return
        self.pool.register(table[index], hashes[index], table[index - 1] if index else None)
        self.content[table[index]] = hashes[index]
        request[2] += 1

    @rule(data=st.data())
    def let_go_of_some(self, data):
        references = [block_id for block_id, count in self.held.items() for _ in range(count)]
        if references:
            some = data.draw(st.lists(st.sampled_from(range(len(references))), unique=True))
            block_ids = [references[index] for index in some]
            self.pool.free(block_ids)
            self.held.subtract(block_ids)

    @precondition(lambda self: self.growing)
    @rule(data=st.data())
    def finish(self, data):
        table, _, _ = self.growing.pop(data.draw(st.integers(0, len(self.growing) - 1)))
        block_ids = [block_id for block_id in table if self.held[block_id]]
        self.pool.free(block_ids)
        self.held.subtract(block_ids)

    @rule(tokens=sequences)
    def pin(self, tokens):
        hashes = [block_hash for block_hash in hash_blocks(ROOT, tokens, 1) if self.pool.is_cached(block_hash)]
        chain = self.pool.cached_chain(hashes[-1]) if hashes else []
        self.pool.take(chain)
        self.held.update(chain)

    @rule(data=st.data())
    def free_too_often(self, data):
        block_id = data.draw(st.integers(1, self.pool.num_blocks - 1))
        others = [other for other, count in self.held.items() if count and other != block_id]
        with pytest.raises(ValueError):
            self.pool.free([*others, *[block_id] * (self.held[block_id] + 1)])

    @rule()
    def clear(self):
        self.pool.clear()

    @invariant()
    def pool_is_whole(self):
        self.pool.check_integrity()
        assert all(block.ref_cnt == self.held[block.block_id] for block in self.pool.blocks)
        assert self.pool.num_active_blocks == len(self.holders())

    @invariant()
    def cache_is_prefix_closed_and_followed_by_its_events(self):
        for event in self.pool.take_events():
            if isinstance(event, BlocksStored):
                assert not self.directory & set(event.block_hashes), "stored twice"
                self.directory |= set(event.block_hashes)
            elif isinstance(event, BlocksRemoved):
                assert self.directory >= set(event.block_hashes), "removed, but never stored"
                self.directory -= set(event.block_hashes)
            else:
                self.directory.clear()
        assert self.directory == set(self.pool.cached_hashes())
        assert all(self.parents[h] is None or self.parents[h] in self.directory for h in self.directory)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

"""The block pool: which blocks are free, cached or active, and which content is where.

Every block is in exactly one of three states (I1), and moves so:

    free ── allocate ──> active ── free, without hash ──> free (given out again first: nothing is lost)
                         active ── free, with hash ─────> cached (given out last)
    cached ── take ──> active          cached ── evicted by allocate, or clear ──> free

The cache is prefix-closed (I2): the parent of a registered block is registered. A registered block knows the very copy
that is its parent. While it is active its parent is, too; when it becomes cached it enters the free queue, and only
then may its parent follow. So in the queue children stand before parents in whatever order holders let go (a hand-off
gives its pins back head first), and eviction takes tails before heads.

Copies of one hash arise when two requests compute the same prefix side by side. All are kept, each with its own parent;
`cached_chain` follows these links so that a request never mixes the copies of two chains.
"""

from collections import Counter
from collections.abc import Sequence

from engine.kvcache.block import NULL_BLOCK_ID, FreeBlockQueue, KVCacheBlock
from engine.kvcache.block_hash import BlockHash
from engine.kvcache.events import EventLog, KVEvent
from engine.kvcache.integrity import check_pool
from engine.kvcache.registered import RegisteredBlocks


class BlockPool:
    """Hands out blocks 1 … num_blocks-1; block 0 is the null block and never is anybody's.

    Args:
        num_blocks: with the null block.
        num_groups: KV cache groups; equal tokens have different KV in each, so hashes are looked up per group.

    Raises:
        ValueError: a pool without a block to give out.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one of them is the null block), not {num_blocks}")
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeBlockQueue()
        for block in self.blocks[NULL_BLOCK_ID + 1 :]:
            self.free_queue.append(block)
        self.registered = [RegisteredBlocks() for _ in range(num_groups)]  # by group
        self._num_cached = 0  # registered blocks in the free queue
        self._events = EventLog()

    @property
    def num_usable_blocks(self) -> int:
        """All that can ever be held at once."""
        return self.num_blocks - 1

    @property
    def num_available_blocks(self) -> int:
        """What `allocate` can give now: free and cached blocks."""
        return len(self.free_queue)

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_queue) - self._num_cached

    @property
    def num_cached_blocks(self) -> int:
        return self._num_cached

    @property
    def num_active_blocks(self) -> int:
        return self.num_usable_blocks - len(self.free_queue)

    # --- holding

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Takes blocks out of the pool, one reference each, evicting cached ones where no free one is left.

        Returns None, and changes nothing, if there are not enough.
        """
        if num_blocks > len(self.free_queue):
            return None
        taken = self.free_queue.popleft_many(num_blocks)
        evicted = [block for block in taken if block.block_hash is not None]
        if evicted:
            self._num_cached -= len(evicted)
            for block in evicted:
                self._forget(block)
        for block in taken:
            block.ref_cnt = 1
        return [block.block_id for block in taken]

    def take(self, block_ids: Sequence[int]) -> None:
        """Adds a reference to blocks that are cached or active.

        Raises:
            ValueError: a block without content that could be shared; nothing is changed.
        """
        blocks = [self._block(block_id) for block_id in block_ids]
        for block in blocks:
            if not block.is_active and block.block_hash is None:
                raise ValueError(f"block {block.block_id} is free: there is nothing in it to hold")
        for block in blocks:
            was_active = block.is_active
            block.ref_cnt += 1
            if not was_active:
                self._activate(block)

    def free(self, block_ids: Sequence[int]) -> None:
        """Gives back one reference for each time a block is named; those that nobody holds then can be reused.

        Raises:
            ValueError: more references than there are, or the null block; nothing is changed.
        """
        # A block table names each of its blocks once; counting what is named more often costs ten times as much.
        counts = dict.fromkeys(block_ids, 1)
        if len(counts) < len(block_ids):
            counts = Counter(block_ids)
        for block_id, count in counts.items():
            block = self._block(block_id)
            if count > block.ref_cnt:
                raise ValueError(f"block {block_id} is freed {count} times, but held {block.ref_cnt} times")
        # Tails first: of one chain they are the first to be evicted, and free blocks come out in order again.
        cached: list[KVCacheBlock] = []
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and block.num_active_children == 0:
                self._retire(block, cached)
        self.free_queue.append_many(cached)
        self._num_cached += len(cached)

    def num_inactive(self, chain: Sequence[int]) -> int:
        """How many blocks of a chain (parents first) nobody holds: what taking it costs of `num_available_blocks`."""
        count = 0
        for block_id in reversed(chain):
            if self.blocks[block_id].is_active:
                break  # and so are all its ancestors
            count += 1
        return count

    # --- content

    def register(self, block_id: int, block_hash: BlockHash, parent_id: int | None = None, group_id: int = 0) -> None:
        """Makes a held, filled block findable under its hash.

        Args:
            parent_id: the registered block that precedes it in the same block table; None for a first block.

        Raises:
            ValueError: nobody holds the block, it is registered already, or its parent is not; nothing is changed.
        """
        block = self._block(block_id)
        if block.ref_cnt == 0:
            raise ValueError(f"block {block_id} cannot be registered: nobody holds it")
        if block.block_hash is not None:
            raise ValueError(f"block {block_id} is registered already")
        parent = None if parent_id is None else self._block(parent_id)
        if parent is not None:
            if parent.block_hash is None or parent.group_id != group_id or not parent.is_active:
                raise ValueError(f"block {block_id} cannot be registered before its parent {parent_id}")
            parent.num_active_children += 1
            block.parent_hash = parent.block_hash
        block.parent = parent
        block.block_hash = block_hash
        block.group_id = group_id
        if self.registered[group_id].add(block_hash, block):
            self._events.stored(block_hash, group_id)

    def is_cached(self, block_hash: BlockHash, group_id: int = 0) -> bool:
        """Whether a block of this content is there, held or not."""
        return block_hash in self.registered[group_id]

    def cached_chain(self, block_hash: BlockHash, group_id: int = 0) -> list[int]:
        """The block of this hash and all before it, parents first; empty if it is not there.

        Of several copies one that is held is preferred: taking it costs no available block.
        """
        copies = self.registered[group_id].copies(block_hash)
        if not copies:
            return []
        block: KVCacheBlock | None = next((copy for copy in copies if copy.is_active), copies[0])
        chain = []
        while block is not None:
            chain.append(block.block_id)
            block = block.parent
        chain.reverse()
        return chain

    def cached_hashes(self, group_id: int = 0) -> list[BlockHash]:
        """Of all registered blocks, held or not: what a directory should know."""
        return list(self.registered[group_id])

    def clear(self) -> None:
        """Forgets the content that nobody holds. What is held stays, and stays findable."""
        for block in self.free_queue:
            if block.block_hash is not None:
                self._unregister(block)
        self._num_cached = 0
        self._events.cleared()
        for group_id, registered in enumerate(self.registered):
            for block_hash in registered:
                self._events.stored(block_hash, group_id)

    @property
    def has_events(self) -> bool:
        return len(self._events) > 0

    def take_events(self) -> tuple[KVEvent, ...]:
        """What was stored, removed and cleared since the last call, in order."""
        return self._events.take()

    # --- transitions

    def _block(self, block_id: int) -> KVCacheBlock:
        if not NULL_BLOCK_ID < block_id < self.num_blocks:
            raise ValueError(f"block id must be in [1, {self.num_blocks - 1}], not {block_id}")
        return self.blocks[block_id]

    def _activate(self, block: KVCacheBlock) -> None:
        """Takes a cached block that just got its first holder out of the queue, and its ancestors with it."""
        while True:
            self.free_queue.remove(block)
            self._num_cached -= 1
            parent = block.parent
            if parent is None:
                return
            was_active = parent.is_active
            parent.num_active_children += 1
            if was_active:
                return
            block = parent

    def _retire(self, block: KVCacheBlock, cached: list[KVCacheBlock]) -> None:
        """Takes in a block that just lost its last holder, and then its ancestors that only it kept.

        Those with content are collected in `cached`, in the order in which they will be evicted.
        """
        if block.block_hash is None:
            self.free_queue.prepend(block)
            return
        while True:
            cached.append(block)
            parent = block.parent
            if parent is None:
                return
            parent.num_active_children -= 1
            if parent.ref_cnt > 0 or parent.num_active_children > 0:
                return
            block = parent

    def _forget(self, block: KVCacheBlock) -> None:
        block_hash, group_id = block.block_hash, block.group_id
        assert block_hash is not None, f"nothing to forget: {block}"
        if self._unregister(block):
            self._events.removed(block_hash, group_id)

    def _unregister(self, block: KVCacheBlock) -> bool:
        """Drops the block's hash; True if it was the last copy."""
        block_hash = block.block_hash
        assert block_hash is not None, f"not registered: {block}"
        assert not block.is_active, f"held, so its content stays: {block}"
        block.block_hash = block.parent = block.parent_hash = None
        return self.registered[block.group_id].remove(block_hash, block)

    def check_integrity(self) -> None:
        """Proves the pool whole; see `integrity`.

        Raises:
            AssertionError: it is not; the message has the numbers.
        """
        check_pool(self)

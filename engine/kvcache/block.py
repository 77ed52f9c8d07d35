"""One block as the pool sees it, and the queue of those that nobody holds.

The queue is a doubly linked list through the blocks themselves: a prefix hit takes a block out of its middle in
constant time, which a deque cannot, and nothing is allocated while serving.
"""

from collections.abc import Iterator

from engine.kvcache.block_hash import BlockHash

NULL_BLOCK_ID = 0  # never given out: what an unused entry of a padded block table may name


class KVCacheBlock:
    """State of one block; see the package's docstring for its life."""

    __slots__ = (
        "block_hash",
        "block_id",
        "group_id",
        "next_free",
        "num_active_children",
        "parent",
        "parent_hash",
        "prev_free",
        "ref_cnt",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0  # holders: places in requests' block tables, and pins
        # Of the registered blocks that name this one as parent, those that are active. They keep it active: a cached
        # block's parent cannot go before it.
        self.num_active_children = 0
        self.group_id = 0
        self.block_hash: BlockHash | None = None  # set while registered
        self.parent: KVCacheBlock | None = None  # the copy it was registered after; None: a sequence's first block
        self.parent_hash: BlockHash | None = None  # remembered, to prove that `parent` is still what it was
        self.prev_free: KVCacheBlock | None = None  # both set while in the free queue
        self.next_free: KVCacheBlock | None = None

    @property
    def is_active(self) -> bool:
        """Whether it is held: by somebody, or by a child that is."""
        return self.ref_cnt > 0 or self.num_active_children > 0

    def __repr__(self) -> str:
        name = self.block_hash.hex()[:8] if self.block_hash is not None else None
        return (
            f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, "
            f"num_active_children={self.num_active_children}, block_hash={name})"
        )


class FreeBlockQueue:
    """Blocks that nobody holds, next to be given out first. Every operation touches a block and its two neighbours."""

    def __init__(self) -> None:
        # A ring through one sentinel: no end of the list is a special case.
        self._sentinel = KVCacheBlock(-1)
        self._sentinel.prev_free = self._sentinel.next_free = self._sentinel
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._sentinel.next_free
        while block is not None and block is not self._sentinel:
            yield block
            block = block.next_free

    def append(self, block: KVCacheBlock) -> None:
        """Adds the block as the last to be given out."""
        self._link(block, before=self._sentinel)

    def prepend(self, block: KVCacheBlock) -> None:
        """Adds the block as the next to be given out."""
        first = self._sentinel.next_free
        assert first is not None
        self._link(block, before=first)

    def popleft(self) -> KVCacheBlock:
        first = self._sentinel.next_free
        assert first is not None
        assert first is not self._sentinel, "no free block to give out"
        self.remove(first)
        return first

    def popleft_many(self, num_blocks: int) -> list[KVCacheBlock]:
        """The next `num_blocks` to be given out, cut out of the queue at once."""
        assert num_blocks <= self._length, f"{num_blocks} blocks of {self._length} that are free"
        taken: list[KVCacheBlock] = []
        block = self._sentinel.next_free
        for _ in range(num_blocks):
            assert block is not None
            taken.append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        assert block is not None
        self._sentinel.next_free, block.prev_free = block, self._sentinel
        self._length -= num_blocks
        return taken

    def append_many(self, blocks: list[KVCacheBlock]) -> None:
        """Adds the blocks as the last to be given out, in this order."""
        last = self._sentinel.prev_free
        assert last is not None
        for block in blocks:
            assert block.next_free is None, f"already in the free queue: {block}"
            last.next_free, block.prev_free = block, last
            last = block
            # So that a block named twice is noticed.
            block.next_free = self._sentinel
        self._sentinel.prev_free = last
        last.next_free = self._sentinel
        self._length += len(blocks)

    def remove(self, block: KVCacheBlock) -> None:
        """Takes the block out, wherever it is."""
        prev_free, next_free = block.prev_free, block.next_free
        assert prev_free is not None, f"not in the free queue: {block}"
        assert next_free is not None, f"not in the free queue: {block}"
        prev_free.next_free, next_free.prev_free = next_free, prev_free
        block.prev_free = block.next_free = None
        self._length -= 1

    def _link(self, block: KVCacheBlock, *, before: KVCacheBlock) -> None:
        assert block.next_free is None, f"already in the free queue: {block}"
        last = before.prev_free
        assert last is not None
        block.prev_free, block.next_free = last, before
        last.next_free = before.prev_free = block
        self._length += 1

    def check_integrity(self) -> None:
        """Proves the links of both directions and the length.

        Raises:
            AssertionError: they do not agree.
        """
        count = 0
        block = self._sentinel
        while True:
            following = block.next_free
            assert following is not None, f"broken link after {block}"
            assert following.prev_free is block, f"broken link back to {block}"
            block = following
            if block is self._sentinel:
                break
            count += 1
            assert count <= self._length, f"more than {self._length} blocks linked"
        assert count == self._length, f"{count} blocks linked, {self._length} counted"

"""Block tables of requests, and pins of hand-offs: who holds which blocks of the pool.

A request's blocks: `get_computed_blocks` finds the longest cached prefix, `allocate_slots` takes it and the blocks for
the rest (all or nothing), and grows the tables later; `cache_blocks` registers full blocks when their slots are filled;
`free` gives all back. A hand-off's blocks are pinned, whoever else holds them, and unpinned one by one or all together.

Continuations of one prompt `fork` its tables: all hold the same blocks. A registered block is never written again; a
prompt's last block, full only in part, is copied on write: `allocate_slots` gives who is to write into it, while others
hold it too, a block of its own, and `take_copies` says what must be copied before. The last holder writes in place.

A block table changes only in `allocate_slots`: it grows at its end, and a block that is copied is replaced. So the
executor may be shown the very lists kept here.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.kvcache.block_hash import BlockHash
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.slots import num_blocks_for
from engine.kvcache.spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """A cached prefix: found, not held yet. Valid until the pool changes."""

    block_tables: tuple[tuple[int, ...], ...]  # one a group, equally long

    @property
    def num_blocks(self) -> int:
        return len(self.block_tables[0])


@dataclass(slots=True)
class _Holding:
    block_tables: tuple[list[int], ...]
    num_registered: int  # leading blocks whose hashes are in the cache
    num_tokens: int = 0  # that the tables are known to be long enough for
    # Whether blocks that are not registered may have other holders, so that who writes must look.
    is_forked: bool = False


class KVCacheManager:
    """One pool, shared by all KV cache groups.

    Raises:
        ValueError: no group, or groups whose block sizes differ.
    """

    def __init__(self, num_blocks: int, specs: Sequence[KVCacheSpec]) -> None:
        if not specs or len({spec.block_size for spec in specs}) != 1:
            raise ValueError(f"KV cache groups must be one or more of equal block size, not {list(specs)}")
        self.specs = tuple(specs)
        self.block_size = specs[0].block_size
        self.pool = BlockPool(num_blocks, len(specs))
        self._holdings: dict[str, _Holding] = {}
        self._pins: Counter[int] = Counter()
        self._copies: list[tuple[int, int]] = []

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks, over all groups, that hold a sequence of `num_tokens` tokens."""
        return sum(spec.num_blocks_for(num_tokens) for spec in self.specs)

    # --- requests

    def num_computed_blocks(self, block_hashes: Sequence[BlockHash], max_blocks: int | None = None) -> int:
        """How many leading blocks are cached in every group, at most `max_blocks`.

        The cache is prefix-closed, so a bisection finds it: cheap enough to ask again every step.
        """
        low, high = 0, len(block_hashes) if max_blocks is None else min(len(block_hashes), max_blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if all(self.pool.is_cached(block_hashes[middle - 1], group_id) for group_id in range(len(self.specs))):
                low = middle
            else:
                high = middle - 1
        return low

    def get_computed_blocks(self, block_hashes: Sequence[BlockHash], max_blocks: int | None = None) -> ComputedBlocks:
        """The longest cached prefix, of at most `max_blocks` blocks."""
        num_blocks = self.num_computed_blocks(block_hashes, max_blocks)
        if num_blocks == 0:
            return ComputedBlocks(tuple(() for _ in self.specs))
        last_hash = block_hashes[num_blocks - 1]
        tables = tuple(tuple(self.pool.cached_chain(last_hash, group_id)) for group_id in range(len(self.specs)))
        assert all(len(table) == num_blocks for table in tables), f"{tables} for a prefix of {num_blocks} blocks"
        return ComputedBlocks(tables)

    def allocate_slots(
        self, request_id: str, num_tokens: int, *, computed: ComputedBlocks | None = None, keep_available: int = 0
    ) -> bool:
        """Makes the request's tables long enough for `num_tokens` tokens, and writable behind those registered.

        Args:
            computed: for a request that holds nothing yet: the cached prefix to begin with.
            keep_available: blocks that must be left for others, if any are taken.

        Returns False, and changes nothing, if the pool has not enough.
        """
        holding = self._holdings.get(request_id)
        assert holding is None or computed is None, f"{request_id} holds blocks already"
        shared: list[tuple[list[int], int]] = []
        if holding is not None:
            if num_tokens <= holding.num_tokens and not holding.is_forked:
                return True  # as in most decode steps
            tables = holding.block_tables
            num_revived = 0
            if holding.is_forked:
                shared = self._shared(holding)
        else:
            tables = tuple(map(list, computed.block_tables)) if computed else tuple([] for _ in self.specs)
            num_revived = sum(self.pool.num_inactive(table) for table in tables)
        missing = [
            max(0, spec.num_blocks_for(num_tokens) - len(table)) for spec, table in zip(self.specs, tables, strict=True)
        ]
        num_missing = sum(missing) + len(shared)
        if num_missing + num_revived + keep_available > self.pool.num_available_blocks:
            return False
        if holding is None:
            for table in tables:
                self.pool.take(table)
            holding = self._holdings[request_id] = _Holding(tables, num_registered=len(tables[0]))
        for table, count in zip(tables, missing, strict=True):
            if count:
                block_ids = self.pool.allocate(count)
                assert block_ids is not None, f"{count} of {num_missing} blocks counted as available are not"
                table.extend(block_ids)
        for table, index in shared:
            self._copy(table, index)
        holding.is_forked = False
        holding.num_tokens = max(holding.num_tokens, num_blocks_for(num_tokens, self.block_size) * self.block_size)
        return True

    def fork(self, parent_id: str, child_id: str) -> None:
        """Gives the child, which holds nothing yet, all that the parent holds: one more reference a block."""
        parent = self._holdings[parent_id]
        assert child_id not in self._holdings, f"{child_id} holds blocks already"
        for table in parent.block_tables:
            self.pool.take(table)
        parent.is_forked = True
        self._holdings[child_id] = replace(parent, block_tables=tuple(map(list, parent.block_tables)))

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """(from, to) of all blocks replaced since the last call, to be copied in this order before anything is written.

        A block may have lost its last holder since, and be somebody else's: it still is to be copied as it was.
        """
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def cache_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Registers the request's leading `num_blocks` blocks, which are filled; those done before are skipped."""
        holding = self._holdings[request_id]
        first = holding.num_registered
        if num_blocks <= first:
            return
        for group_id, table in enumerate(holding.block_tables):
            for index in range(first, num_blocks):
                parent_id = table[index - 1] if index > 0 else None
                self.pool.register(table[index], block_hashes[index], parent_id, group_id)
        holding.num_registered = num_blocks

    def free(self, request_id: str) -> None:
        """Gives back all that the request holds; nothing, if it holds nothing."""
        holding = self._holdings.pop(request_id, None)
        if holding is not None:
            for table in holding.block_tables:
                self.pool.free(table)

    def block_tables(self, request_id: str) -> tuple[list[int], ...]:
        """One a group; the lists themselves, which grow as the request does."""
        return self._holdings[request_id].block_tables

    def holds(self, request_id: str) -> bool:
        """Whether the request holds blocks."""
        return request_id in self._holdings

    @property
    def num_holding(self) -> int:
        """Requests that hold blocks."""
        return len(self._holdings)

    def num_held_blocks(self, request_id: str) -> int:
        """Over all groups."""
        return sum(len(table) for table in self._holdings[request_id].block_tables)

    def num_registered_blocks(self, request_id: str) -> int:
        """Leading blocks of the request that are in the cache."""
        return self._holdings[request_id].num_registered

    # --- hand-offs

    def pin(self, block_ids: Sequence[int]) -> None:
        """Holds blocks that are cached or active, once more each."""
        self.pool.take(block_ids)
        self._pins.update(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Gives back pins, in any order.

        Raises:
            ValueError: a block that is not pinned so often; nothing is changed.
        """
        counts = Counter(block_ids)
        for block_id, count in counts.items():
            if count > self._pins[block_id]:
                raise ValueError(f"block {block_id} is unpinned {count} times, but pinned {self._pins[block_id]} times")
        self.pool.free(block_ids)
        for block_id, count in counts.items():
            self._pins[block_id] -= count
            if not self._pins[block_id]:
                del self._pins[block_id]

    @property
    def num_pins(self) -> int:
        return self._pins.total()

    def _shared(self, holding: _Holding) -> list[tuple[list[int], int]]:
        """(table, index) of the blocks that are not registered and have other holders: they must not be written."""
        return [
            (table, index)
            for table in holding.block_tables
            for index in range(holding.num_registered, len(table))
            if self.pool.blocks[table[index]].ref_cnt > 1
        ]

    def _copy(self, table: list[int], index: int) -> None:
        block_ids = self.pool.allocate(1)
        assert block_ids is not None, "a block counted as available is not"
        (copy,) = block_ids
        self._copies.append((table[index], copy))
        self.pool.free([table[index]])
        table[index] = copy

    # --- proof

    def check_integrity(self) -> None:
        """Proves the pool whole, that every reference belongs to a block table or a pin, and that nobody would write
        into a block which others hold.

        Raises:
            AssertionError: it does not; the message has the numbers.
        """
        self.pool.check_integrity()
        held = Counter(self._pins)
        for request_id, holding in self._holdings.items():
            for group_id, table in enumerate(holding.block_tables):
                held.update(table)
                registered = [self.pool.blocks[block_id].block_hash is not None for block_id in table]
                expected = [index < holding.num_registered for index in range(len(table))]
                assert registered == expected, (
                    f"{request_id} has {holding.num_registered} blocks registered, but in group {group_id} {registered}"
                )
            assert holding.is_forked or not self._shared(holding), (
                f"{request_id} would write into blocks that others hold: {self._shared(holding)}"
            )
        for block in self.pool.blocks:
            assert block.ref_cnt == held[block.block_id], (
                f"{held[block.block_id]} tables and pins hold block {block.block_id}, its ref_cnt is {block.ref_cnt}"
            )

"""Where blocks wait for a consumer that cannot reach the pool itself: slots in host memory."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

from engine.kvcache.block import NULL_BLOCK_ID
from engine.memory import KVLayout
from kvtransfer.memfd import MemfdMemory

STAGING_BYTES = 256 << 20
MIN_SLOTS = 8  # however large blocks are: so many that a hand-off has two, one to be copied and one to be read


class StagingArea:
    """Slots of a block each, in memory that any process of this host can map; each in use belongs to a hand-off."""

    def __init__(self, layout: KVLayout, nbytes: int = STAGING_BYTES) -> None:
        """
        Raises:
            ValueError: it holds not even one block.
            OSError: the kernel does not give the memory.
        """
        self.num_slots = nbytes // layout.bytes_per_block
        if self.num_slots < 1:
            raise ValueError(f"a staging area of {nbytes} bytes holds no block of {layout.bytes_per_block}")
        self.layout = layout
        # One more, that nobody uses: number 0 means no block.
        self.memory = MemfdMemory((1 + self.num_slots) * layout.bytes_per_block)
        self._free = deque(range(1, 1 + self.num_slots))
        self._owners: dict[int, str] = {}  # hand-off, by slot in use
        self._num_held: Counter[str] = Counter()  # slots, by hand-off

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_held(self, handoff_id: str) -> int:
        """Slots that a hand-off has."""
        return self._num_held[handoff_id]

    def take(self, handoff_id: str, block_ids: Sequence[int]) -> tuple[int, ...]:
        """A slot for each block, there being enough; for a null block none (0): there is nothing to copy."""
        return tuple(NULL_BLOCK_ID if b == NULL_BLOCK_ID else self._take_one(handoff_id) for b in block_ids)

    def give_back(self, slot_ids: Sequence[int]) -> None:
        """They are free at once. Null ones are no slots."""
        for slot_id in slot_ids:
            if slot_id != NULL_BLOCK_ID:
                owner = self._owners.pop(slot_id)
                self._num_held[owner] -= 1
                if not self._num_held[owner]:
                    del self._num_held[owner]
                self._free.append(slot_id)

    def check_integrity(self) -> None:
        """Every slot is free, or in use by one hand-off."""
        free, used = set(self._free), set(self._owners)
        assert len(free) == len(self._free), f"slots are free twice: {sorted(self._free)}"
        assert free | used == set(range(1, 1 + self.num_slots)), f"slots were lost: {free} free, {used} used"
        assert not free & used, f"slots are free and in use: {free & used}"
        assert Counter(self._owners.values()) == self._num_held, (self._owners, self._num_held)

    def close(self) -> None:
        """Frees the memory, with the last mapping of it. Idempotent."""
        self.memory.close()

    def _take_one(self, handoff_id: str) -> int:
        slot_id = self._free.popleft()
        self._owners[slot_id] = handoff_id
        self._num_held[handoff_id] += 1
        return slot_id


class StagingCopies(Protocol):
    """How blocks of the pool come into slots. All calls on one thread."""

    def copy(self, block_ids: Sequence[int], slot_ids: Sequence[int], fence: int | None) -> None:
        """Copies block block_ids[i] into slot slot_ids[i]; when it returns, other processes see it.

        Args:
            fence: the pool's own mark to wait for before reading; None: the blocks are filled already.

        Raises:
            TransferError: the copy failed.
        """
        ...

    def close(self) -> None:
        """Lets go of pool and slots. Idempotent."""
        ...

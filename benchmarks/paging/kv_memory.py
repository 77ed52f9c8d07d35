"""Memories for KV, as the simulation sees them: who may come in, who may grow, and what is given out.

Contiguous memories reserve a request's whole place when it comes, so growing always works, and what is reserved and not
used is lost to others. Paged ones give a place when a token needs it, so a request may find none and must be preempted.
"""

from collections.abc import Callable
from typing import Protocol

from benchmarks.paging.allocators import ContiguousAllocator, Extent, next_power_of_two
from benchmarks.paging.lengths import Lengths
from engine.kvcache.manager import KVCacheManager
from engine.kvcache.spec import FullAttentionSpec

Reservation = Callable[[Lengths, int], int]  # of a request, and of the longest context: slots to reserve


class KVMemory(Protocol):
    """One suite of tests runs over all implementations."""

    @property
    def num_slots(self) -> int:
        """Tokens that would fill the memory if nothing were wasted."""
        ...

    def num_granted_slots(self, name: str) -> int:
        """Of them, those that no other request can have now."""
        ...

    def admit(self, name: str, lengths: Lengths, num_tokens: int) -> bool:
        """Takes a request in that has `num_tokens` tokens now; False, and nothing changed, if it must wait."""
        ...

    def grow(self, name: str, num_tokens: int) -> bool:
        """Has room for `num_tokens` tokens of the request; False, and nothing changed, if not."""
        ...

    def release(self, name: str) -> None:
        """Takes all back that the request has."""
        ...


class ContiguousMemory:
    """One run of slots a request, reserved for its whole life."""

    def __init__(self, allocator: ContiguousAllocator, reservation: Reservation, max_len: int) -> None:
        self._allocator = allocator
        self._reservation = reservation
        self._max_len = max_len
        self._extents: dict[str, Extent] = {}

    @property
    def num_slots(self) -> int:
        return self._allocator.capacity

    def num_granted_slots(self, name: str) -> int:
        return self._extents[name].size

    def admit(self, name: str, lengths: Lengths, num_tokens: int) -> bool:
        extent = self._allocator.allocate(self._reservation(lengths, self._max_len))
        if extent is None:
            return False
        self._extents[name] = extent
        return True

    def grow(self, name: str, num_tokens: int) -> bool:
        assert num_tokens <= self._extents[name].size, f"{num_tokens} tokens of {name} in {self._extents[name]}"
        return True

    def release(self, name: str) -> None:
        self._allocator.free(self._extents.pop(name))


class PagedMemory:
    """The engine's own pool. Its null block, which is never given out, counts as memory."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        """
        Raises:
            ValueError: not two blocks.
        """
        self.num_slots = num_slots
        self.block_size = block_size
        self.manager = KVCacheManager(num_slots // block_size, [FullAttentionSpec(block_size)])

    def num_granted_slots(self, name: str) -> int:
        return self.manager.num_held_blocks(name) * self.block_size

    def admit(self, name: str, lengths: Lengths, num_tokens: int) -> bool:
        return self.manager.allocate_slots(name, num_tokens)

    def grow(self, name: str, num_tokens: int) -> bool:
        return self.manager.allocate_slots(name, num_tokens)

    def release(self, name: str) -> None:
        self.manager.free(name)


class MappedMemory:
    """vAttention's: pages, mapped on demand under `num_ranges` contiguous ranges a request.

    Only the counting: any page fits anywhere, so places do not matter.
    """

    def __init__(self, num_slots: int, *, bytes_per_token: int, num_ranges: int, page_size: int) -> None:
        """
        Args:
            bytes_per_token: in each of the ranges.
            page_size: bytes.
        """
        self.num_slots = num_slots
        self._bytes_per_token = bytes_per_token
        self._num_ranges = num_ranges
        self._page_size = page_size
        self._num_free_pages = num_slots * bytes_per_token * num_ranges // page_size
        self._num_pages: dict[str, int] = {}  # of each range

    def num_granted_slots(self, name: str) -> int:
        """Whole ones."""
        return self._num_pages[name] * self._page_size // self._bytes_per_token

    def admit(self, name: str, lengths: Lengths, num_tokens: int) -> bool:
        return self._have(name, num_tokens)

    def grow(self, name: str, num_tokens: int) -> bool:
        return self._have(name, num_tokens)

    def release(self, name: str) -> None:
        self._num_free_pages += self._num_pages.pop(name) * self._num_ranges

    def _have(self, name: str, num_tokens: int) -> bool:
        needed = -(-num_tokens * self._bytes_per_token // self._page_size)
        missing = (needed - self._num_pages.get(name, 0)) * self._num_ranges
        if missing > self._num_free_pages:
            return False
        if missing > 0:
            self._num_free_pages -= missing
            self._num_pages[name] = needed
        return True


# --- what contiguous systems reserve; the names are the paper's


def reserve_max(lengths: Lengths, max_len: int) -> int:
    """The longest context, whatever comes."""
    return max_len


def reserve_pow2(lengths: Lengths, max_len: int) -> int:
    """The output's next power of two: as if its length were known within a factor of two."""
    return min(lengths.prompt + next_power_of_two(lengths.output), max_len)


def reserve_oracle(lengths: Lengths, max_len: int) -> int:
    """What it will turn out to need."""
    return lengths.total


RESERVATIONS: dict[str, Reservation] = {"max": reserve_max, "pow2": reserve_pow2, "oracle": reserve_oracle}

"""Allocators of contiguous runs of KV slots in one memory: what serving systems had before paging.

Both hand out real places, so that external fragmentation is real: free slots that lie apart serve nobody.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A run of slots; perhaps longer than was asked for."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


class ContiguousAllocator(Protocol):
    """One suite of tests runs over all implementations."""

    @property
    def capacity(self) -> int:
        """Slots in all."""
        ...

    @property
    def num_free_slots(self) -> int: ...

    def allocate(self, num_slots: int) -> Extent | None:
        """A run of at least `num_slots` slots; None, and nothing changed, if there is none."""
        ...

    def free(self, extent: Extent) -> None:
        """Takes back an extent that `allocate` gave."""
        ...


class FirstFitAllocator:
    """Takes the beginning of the first hole that is large enough; neighbouring holes become one."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._holes = [Extent(0, capacity)]  # by start; no two touch

    @property
    def num_free_slots(self) -> int:
        return sum(hole.size for hole in self._holes)

    def allocate(self, num_slots: int) -> Extent | None:
        for index, hole in enumerate(self._holes):
            if hole.size >= num_slots:
                rest = Extent(hole.start + num_slots, hole.size - num_slots)
                self._holes[index : index + 1] = [rest] if rest.size else []
                return Extent(hole.start, num_slots)
        return None

    def free(self, extent: Extent) -> None:
        index = bisect_left(self._holes, extent)
        start, end = extent.start, extent.end
        first, last = index, index
        if index > 0 and self._holes[index - 1].end == start:
            first, start = index - 1, self._holes[index - 1].start
        if index < len(self._holes) and self._holes[index].start == end:
            last, end = index + 1, self._holes[index].end
        self._holes[first:last] = [Extent(start, end - start)]


class BuddyAllocator:
    """Powers of two, each at a multiple of its size: runs are split in halves until they fit, and halves joined again.

    A capacity that is no power of two is a row of such runs, largest first: 12 slots are 8 and 4.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._starts: dict[int, list[int]] = {1 << order: [] for order in range(capacity.bit_length())}  # free, by size
        start = 0
        for size in sorted(self._starts, reverse=True):
            if capacity & size:
                self._starts[size].append(start)
                start += size

    @property
    def num_free_slots(self) -> int:
        return sum(size * len(starts) for size, starts in self._starts.items())

    def allocate(self, num_slots: int) -> Extent | None:
        wanted = next_power_of_two(num_slots)
        size = wanted
        while not self._starts.get(size):
            size *= 2
            if size > self.capacity:
                return None
        start = self._starts[size].pop(0)  # the lowest: keeps the rest whole
        while size > wanted:
            size //= 2
            insort(self._starts[size], start + size)
        return Extent(start, wanted)

    def free(self, extent: Extent) -> None:
        start, size = extent.start, extent.size
        while True:
            starts = self._starts[size]
            index = bisect_left(starts, start ^ size)
            if index == len(starts) or starts[index] != start ^ size:
                break
            del starts[index]
            start, size = min(start, start ^ size), 2 * size
        insort(self._starts[size], start)


def next_power_of_two(number: int) -> int:
    """The least power of two that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()

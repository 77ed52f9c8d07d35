"""How fast blocks are copied from pool to pool, against one plain `memcpy` of as many bytes.

"Warm" is what workers do: a pool's pages are brought in when it is mapped, on both sides (`kvtransfer.population`).
"Cold" is the first use of pages that nobody has touched: the kernel then finds and zeroes each while the copy waits.
What copies are compared with is a `memcpy` between memory of the same kind that is warm; one between private memory of
this process, and one into a cold pool, stand beside.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.paging.report import Column, Table
from engine.memory import KVLayout
from kvtransfer.copier import Blocks, copy_blocks
from kvtransfer.memfd import MemfdMapping, MemfdMemory

PLAIN = "memcpy, pool to pool, warm"
HANDOFF = "blocks, pool to pool, warm"


@dataclass(frozen=True, slots=True)
class CopyRate:
    """Of one way to copy the same bytes."""

    name: str
    nbytes: int
    seconds: Sequence[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.median_s / 1e9


class Pools:
    """A peer's pool, mapped, and one of our own; pages of both are there."""

    def __init__(self, num_blocks: int, bytes_per_block: int) -> None:
        layout = KVLayout(16, bytes_per_block, bytes(16))
        # Twice what is copied, so that every second block can be.
        self.pool_bytes = 2 * num_blocks * bytes_per_block
        self._layout = layout
        self._owner = MemfdMemory(self.pool_bytes)
        self._own = MemfdMemory(self.pool_bytes)
        self.blocks_of(self._owner)[:] = 1
        self._own.populate().wait()
        self._peer = MemfdMapping(self._owner.handle("owner", layout))
        self._peer.population.wait()
        self.source = self._as_blocks(self._peer.buffer)
        self.target = self.blocks_of(self._own)

    def blocks_of(self, memory: MemfdMemory) -> Blocks:
        return self._as_blocks(memory.buffer)

    def _as_blocks(self, buffer: memoryview) -> Blocks:
        return np.frombuffer(buffer, np.uint8).reshape(-1, self._layout.bytes_per_block)

    def close(self) -> None:
        for memory in (self._peer, self._own, self._owner):
            memory.close()


def copy_rates(num_blocks: int, bytes_per_block: int, repeats: int) -> list[CopyRate]:
    """All ways in turn, `repeats` times, so that what disturbs this machine disturbs all of them.

    Each time in another order: what the one before has left in the CPU's caches must not decide.

    Raises:
        ValueError: a number is below 1.
    """
    if min(num_blocks, bytes_per_block, repeats) < 1:
        raise ValueError(f"at least one block, byte and copy, not {num_blocks}, {bytes_per_block} and {repeats}")
    nbytes = num_blocks * bytes_per_block
    pools = Pools(num_blocks, bytes_per_block)
    source, target = pools.source, pools.target
    private = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    in_a_row = list(range(num_blocks))
    every_second = list(range(0, 2 * num_blocks, 2))  # no two are neighbours

    def into_new_pool(copy: Callable[[Blocks], object]) -> float:
        memory = MemfdMemory(pools.pool_bytes)
        seconds = _seconds(lambda: copy(pools.blocks_of(memory)))
        memory.close()
        return seconds

    def warm(copy: Callable[[], object]) -> Callable[[], float]:
        return lambda: _seconds(copy)

    ways: dict[str, Callable[[], float]] = {
        PLAIN: warm(lambda: np.copyto(target[:num_blocks], source[:num_blocks])),
        "memcpy, private memory, warm": warm(lambda: np.copyto(private[1], private[0])),
        HANDOFF: warm(lambda: copy_blocks(source, target, in_a_row, in_a_row)),
        "the same, no two blocks neighbours": warm(lambda: copy_blocks(source, target, every_second, in_a_row)),
        "memcpy, pool to pool, cold": lambda: into_new_pool(
            lambda new: np.copyto(new[:num_blocks], source[:num_blocks])
        ),
        "blocks, pool to pool, cold": lambda: into_new_pool(lambda new: copy_blocks(source, new, in_a_row, in_a_row)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():  # caches, and whatever else is done once
        way()
    for names in orders(tuple(ways), repeats):
        for name in names:
            seconds[name].append(ways[name]())
    pools.close()
    return [CopyRate(name, nbytes, times) for name, times in seconds.items()]


def orders(names: Sequence[str], repeats: int) -> Iterator[list[str]]:
    """The names of each repeat, an even number of them, so that another comes first, and another before each.

    Rotated alone, each would keep the one that comes before it. Rows of a Williams square instead: in as many repeats
    as there are names, each comes once at each place, and once right after each other.
    """
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(len(names))]
    for repeat in range(repeats):
        yield [names[(repeat + step) % len(names)] for step in zigzag]


def populating_s_per_gib(nbytes: int = 1 << 28) -> float:
    """What it takes to bring in a new pool's pages."""
    memory = MemfdMemory(nbytes)
    seconds = _seconds(lambda: memory.populate().wait())
    memory.close()
    return seconds * (1 << 30) / nbytes


def copies_table(rates: Sequence[CopyRate]) -> Table:
    """Each way's median, and its share of the plain copy's speed."""
    plain = next(rate for rate in rates if rate.name == PLAIN)
    table = Table(
        "copies",
        f"{plain.nbytes / 1e6:.1f} MB of blocks, in this process",
        [Column("copy"), Column("ms", ".2f"), Column("GB/s", ".1f"), Column("of the plain one's speed, %", ".0f")],
    )
    for rate in rates:
        table.add(rate.name, 1000 * rate.median_s, rate.gb_per_s, 100 * rate.gb_per_s / plain.gb_per_s)
    return table


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began

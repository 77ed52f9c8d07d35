"""The gateway's table of who caches what: asked, and told, while it knows more and more blocks."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.growth.verdict import Finding, constant, numbers
from benchmarks.paging.report import Column, Table
from cluster.directory import Applied, Directory
from engine.kvcache.block_hash import BlockHash, root_hash
from engine.kvcache.events import BlocksRemoved, BlocksStored

WORKERS = 4
PREFIX_BLOCKS = 64
# A look-up of one block is three looks into memory: a table of a thousand blocks has all in the CPU's caches, one of a
# million has none.
CONSTANT = 5.0


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """What is run.

    Raises:
        ValueError: there is nothing to measure, or the fewest blocks are no more than one look-up asks for.
    """

    num_blocks: Sequence[int]  # known, rising
    repeats: int = 500

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"a directory is asked at least once, not {self.repeats} times")
        if self.num_blocks[0] <= PREFIX_BLOCKS:
            raise ValueError(f"a directory knows more than {PREFIX_BLOCKS} blocks, not {self.num_blocks[0]}")


def directory_finding(config: DirectoryConfig) -> Finding:
    """A row for each size."""
    table = Table(
        "directory",
        f"The gateway's directory ({WORKERS} workers; {PREFIX_BLOCKS} blocks each look-up and each batch of events)",
        [
            Column("blocks known", ","),
            Column("prefix of all workers, µs", ",.1f"),
            Column("unknown prefix, µs", ",.2f"),
            Column("stored and removed, µs", ",.1f"),
        ],
    )
    for num_blocks in config.num_blocks:
        table.add(num_blocks, *(1e6 * seconds for seconds in _costs(num_blocks, config.repeats)))
    ends = f"{config.num_blocks[-1]:,} blocks over {config.num_blocks[0]:,}"
    names = [column.name for column in table.columns[1:]]
    return Finding(table, [constant(f"{n.partition(',')[0]}, {ends}", numbers(table, n), CONSTANT) for n in names])


def _costs(num_blocks: int, repeats: int) -> list[float]:
    """Medians in seconds."""
    directory = Directory()
    hashes = [_hash(number) for number in range(num_blocks)]
    for number in range(WORKERS):
        directory.begin(str(number), 0, 0)
        directory.add_snapshot(str(number), hashes)
    sequence = 0

    def look_up(number: int) -> None:
        held = directory.longest_prefix(asked[number])
        assert len(held) == WORKERS, held

    def look_up_unknown(number: int) -> None:
        assert not directory.longest_prefix([unknown[number]])

    def change(number: int) -> None:
        nonlocal sequence
        sequence += 1
        new = tuple(unknown[:PREFIX_BLOCKS])
        applied = directory.apply("0", 0, sequence, [BlocksStored(new), BlocksRemoved(new)])
        assert applied is Applied.OK, applied

    # Made anew, as a gateway makes them of a prompt.
    starts = [number * 7919 * PREFIX_BLOCKS % (num_blocks - PREFIX_BLOCKS) for number in range(repeats)]
    asked = [[_hash(number) for number in range(start, start + PREFIX_BLOCKS)] for start in starts]
    unknown = [_hash(-1 - number) for number in range(max(repeats, PREFIX_BLOCKS))]
    return [_median_s(work, repeats) for work in (look_up, look_up_unknown, change)]


def _hash(number: int) -> BlockHash:
    return root_hash(number.to_bytes(16, "big", signed=True))


def _median_s(work: Callable[[int], None], repeats: int) -> float:
    seconds = []
    for number in range(repeats):
        began = time.perf_counter()
        work(number)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)

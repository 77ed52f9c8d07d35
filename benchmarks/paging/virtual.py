"""Section `virtual`: pages mapped on demand under contiguous ranges, beside blocks from the pool.

vAttention (Prabhu et al., 2024) keeps a request's KV contiguous in virtual addresses and maps memory under it as it
grows, so that attention kernels need no block table. Two questions: how much is wasted, since a page is the least that
can be mapped; and what a token's growth costs, since mapping is a call into the kernel. Each for two arrangements: a
range for K and one for V of every layer, as vAttention has it, and one range a request in which a token's KV of all
layers lies together.
"""

import ctypes
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paging.kv_memory import KVMemory, MappedMemory, PagedMemory
from benchmarks.paging.lengths import Workload
from benchmarks.paging.mapped_range import HUGE_PAGE, SMALL_PAGE, MappedRange, PageKind, PagePool
from benchmarks.paging.report import Column, Table
from benchmarks.paging.simulation import StepTime, simulate
from engine.kvcache.manager import KVCacheManager
from engine.kvcache.spec import FullAttentionSpec

_ROUNDS = 5
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a token's KV is."""

    name: str
    num_layers: int
    vector_bytes: int  # of a token's K, or V, in one layer

    def arrangements(self) -> dict[str, tuple[int, int]]:
        """By name: ranges a request, and bytes of a token in each."""
        num_ranges = 2 * self.num_layers
        return {
            f"{num_ranges} ranges": (num_ranges, self.vector_bytes),
            "1 range": (1, num_ranges * self.vector_bytes),
        }


SMOLLM2_135M = KVShape("SmolLM2-135M, bfloat16", 30, 3 * 64 * 2)
OPT_13B = KVShape("OPT-13B, float16", 40, 40 * 128 * 2)


def waste_table(shape: KVShape, workload: Workload, num_slots: int, step_time: StepTime) -> Table:
    """The share of memory that holds tokens, under load, for page sizes."""
    table = Table(
        f"mapped pages, {shape.name}",
        f"Pages mapped on demand: {shape.name}, {workload.name}, memory for {num_slots:,} tokens",
        (
            Column("memory"),
            Column("tokens a page", ",.1f"),
            Column("holds tokens, %", ".1f"),
            Column("granted in vain, %", ".1f"),
            Column("running", ".1f"),
            Column("tokens/s", ",.0f"),
        ),
    )

    def add(name: str, tokens_per_page: float, memory: KVMemory) -> None:
        try:
            occupancy = simulate(memory, workload.requests, step_time)
        except ValueError:
            table.add(f"{name}: a request does not fit", tokens_per_page, None, None, None, None)
            return
        in_vain = occupancy.promised + occupancy.unused
        shares = (100 * occupancy.tokens, 100 * in_vain)
        table.add(name, tokens_per_page, *shares, occupancy.num_running, occupancy.output_tokens_per_s)

    add(f"blocks of {_BLOCK_SIZE}", _BLOCK_SIZE, PagedMemory(num_slots, _BLOCK_SIZE))
    for arrangement, (num_ranges, token_bytes) in shape.arrangements().items():
        for size, name in ((SMALL_PAGE, "4 KiB"), (64 << 10, "64 KiB"), (HUGE_PAGE, "2 MiB")):
            memory = MappedMemory(num_slots, bytes_per_token=token_bytes, num_ranges=num_ranges, page_size=size)
            add(f"{arrangement}, {name}", size / token_bytes, memory)
    table.notes.append("64 KiB: what vAttention made the GPU's driver map; a CPU has no such page")
    return table


# --- what growing costs


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one request that grows token by token and then ends; seconds, all of it."""

    growing: float
    touching: float  # writing there for the first time: the faults that fill the page table
    releasing: float
    num_calls: int  # of mmap, while growing

    @classmethod
    def median(cls, rounds: list["Growth"]) -> "Growth":
        return cls(
            statistics.median(growth.growing for growth in rounds),
            statistics.median(growth.touching for growth in rounds),
            statistics.median(growth.releasing for growth in rounds),
            rounds[0].num_calls,
        )


def growth_table(shape: KVShape, num_tokens: int) -> Table:
    """Measured: a request grows to `num_tokens` tokens, from blocks, and from mapped pages of both sizes; medians."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    table = Table(
        "cost of growing",
        f"A request grows to {num_tokens:,} tokens, {shape.name}, and ends: cost a token",
        (
            Column("memory"),
            Column("map or allocate, µs", ",.2f"),
            Column("first touch, µs", ",.2f"),
            Column("release, µs", ",.2f"),
            Column("mmap calls", ",.2f"),
            Column("× block pool", ",.1f"),
            Column("tokens at the limit of mappings", ",.0f"),
        ),
        notes=[
            f"vm.max_map_count allows a process {limit:,} mappings; pages that lie apart are one each",
            f"of each mmap call {1e6 * _call_overhead():.2f} µs are Python's way into C",
        ],
    )
    blocks = Growth.median([_grow_in_blocks(num_tokens) for _ in range(_ROUNDS)])
    whole = blocks.growing + blocks.releasing

    def add(name: str, growth: Growth) -> None:
        costs = [1e6 * seconds / num_tokens for seconds in (growth.growing, growth.touching, growth.releasing)]
        calls = growth.num_calls / num_tokens
        ratio = (growth.growing + growth.touching + growth.releasing) / whole
        table.add(name, *costs, calls, ratio, limit / calls if calls else None)

    add(f"blocks of {_BLOCK_SIZE}, the engine's pool", blocks)
    for arrangement, (num_ranges, token_bytes) in shape.arrangements().items():
        for huge in (False, True):
            kind, rounds = _grow_in_pages(num_ranges, token_bytes, num_tokens, huge=huge)
            add(f"{arrangement}, {kind.value}", Growth.median(rounds))
    if kind is PageKind.ASKED:
        table.notes.append(
            "the kernel has no huge pages to give (vm.nr_hugepages, shmem_enabled): 2 MiB are mapped by one call, but "
            "reach the page table 4 KiB at a time"
        )
    return table


def _grow_in_blocks(num_tokens: int) -> Growth:
    manager = KVCacheManager(2 + num_tokens // _BLOCK_SIZE, [FullAttentionSpec(_BLOCK_SIZE)])

    def grow() -> None:
        for count in range(1, num_tokens + 1):
            assert manager.allocate_slots("request", count)

    # A pool is mapped once, when a worker starts: nothing is touched for the first time.
    return Growth(_seconds(grow), 0.0, _seconds(lambda: manager.free("request")), 0)


def _grow_in_pages(num_ranges: int, token_bytes: int, num_tokens: int, *, huge: bool) -> tuple[PageKind, list[Growth]]:
    """Which pages they were in the end, and the rounds."""
    page_size = HUGE_PAGE if huge else SMALL_PAGE
    pages_per_range = -(-num_tokens * token_bytes // page_size)
    num_pages = num_ranges * pages_per_range
    order = list(range(num_pages))
    random.Random(0).shuffle(order)  # as after a while of serving: free pages lie anywhere
    rounds = []
    with ExitStack() as stack:
        pool = stack.enter_context(PagePool(num_pages, huge=huge))
        ranges = [stack.enter_context(MappedRange(pages_per_range * page_size, page_size)) for _ in range(num_ranges)]
        for _ in range(_ROUNDS):
            growing = _seconds(lambda: _map_as_tokens_come(ranges, pool.fd, order, token_bytes, num_tokens))
            touching = _seconds(lambda: _touch(ranges, token_bytes * num_tokens, pool.kind.touched_at_once))
            releasing = _seconds(lambda: _clear(ranges))
            rounds.append(Growth(growing, touching, releasing, num_pages))
    return pool.kind, rounds


def _map_as_tokens_come(
    ranges: list[MappedRange], fd: int, pages: list[int], token_bytes: int, num_tokens: int
) -> None:
    """Maps the file's pages in the given order, whenever a token does not fit any more."""
    following = iter(pages)
    for count in range(1, num_tokens + 1):
        needed = -(-count * token_bytes // ranges[0].page_size)
        while ranges[0].num_mapped < needed:
            for mapped in ranges:
                mapped.map_next(fd, next(following))


def _clear(ranges: list[MappedRange]) -> None:
    for mapped in ranges:
        mapped.clear()


def _touch(ranges: list[MappedRange], num_bytes: int, at_once: int) -> None:
    """Writes a byte wherever the first `num_bytes` of a range need a fault; a call of C each, like the mapping."""
    for mapped in ranges:
        for address in range(mapped.address, mapped.address + num_bytes, at_once):
            ctypes.memset(address, 1, 1)


def _seconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def _call_overhead() -> float:
    """Seconds that a call of C takes from Python if it does nothing there."""
    libc = ctypes.CDLL(None)
    libc.getpagesize.argtypes = []
    count = 2000
    return _seconds(lambda: [libc.getpagesize() for _ in range(count)]) / count

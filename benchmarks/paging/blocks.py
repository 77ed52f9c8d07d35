"""Section `blocks`: what a block size costs, in memory wasted and in the decode kernel's time.

The kernel is the engine's own (backend `cpu`, one thread), over several layers of one pool that is larger than the
caches. Contiguous KV needs no other kernel. With consecutive ids a request's blocks lie in a row, and the walk through
the table is all that is left of paging; with a block as long as the context there is no walk either. The latter is not
always faster: the kernel prefetches the next block while it computes one, and with one block a request there is none.
So a paged time stands beside the best of all times on KV in a row, whatever its block size.
"""

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.paging.kv_memory import PagedMemory
from benchmarks.paging.lengths import Workload
from benchmarks.paging.report import Column, Table
from benchmarks.paging.simulation import StepTime, simulate
from engine.attention.backend import AttentionMetadata, AttentionShape
from engine.attention.cpu import CpuBackend

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

COLUMNS = (
    Column("block size", "d"),
    Column("holds tokens, %", ".1f"),
    Column("wasted of granted, %", ".2f"),
    Column("scattered, µs", ",.0f"),
    Column("in a row, µs", ",.0f"),
    Column("scattered / in a row", ".3f"),
    Column("scattered / best in a row", ".3f"),
)

# Rounds over all cases: a disturbance hits one round of each, not all rounds of one.
_ROUNDS = 31


@dataclass(frozen=True, slots=True)
class KernelSetting:
    """A decode step's attention: the embedded model's heads, unless told otherwise."""

    dtype: torch.dtype
    batch: int = 8
    context_len: int = 1000  # tokens; no multiple of a block, like most
    num_layers: int = 4
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64

    @property
    def layer_bytes(self) -> int:
        """Of keys and values that attention reads in one layer."""
        vectors = self.batch * self.context_len * 2 * self.num_kv_heads
        return vectors * self.head_dim * self.dtype.itemsize


class DecodeCase:
    """One step's attention over blocks of one size, at some places of `memory`."""

    def __init__(self, memory: torch.Tensor, setting: KernelSetting, block_size: int, *, scattered: bool) -> None:
        """
        Args:
            memory: [elements] of `setting.dtype`: the pool is a view of it.
        """
        blocks_per_request = -(-setting.context_len // block_size)
        num_blocks = setting.batch * blocks_per_request + 1
        shape = (num_blocks, setting.num_layers, 2, setting.num_kv_heads, block_size, setting.head_dim)
        self.pool = memory[: torch.Size(shape).numel()].view(shape)
        self._num_layers = setting.num_layers
        ids = np.arange(1, num_blocks, dtype=np.int32)
        if scattered:
            np.random.default_rng(block_size).shuffle(ids)
        tables = ids.reshape(setting.batch, blocks_per_request)
        last = setting.context_len - 1
        self._backend = CpuBackend(num_threads=1)
        self._backend.prepare(
            AttentionShape(
                num_heads=setting.num_heads,
                num_kv_heads=setting.num_kv_heads,
                head_dim=setting.head_dim,
                block_size=block_size,
                dtype=setting.dtype,
                kv_dtype=setting.dtype,
                scale=setting.head_dim**-0.5,
            )
        )
        self._backend.plan(
            AttentionMetadata(
                num_decodes=setting.batch,
                query_start=np.arange(setting.batch + 1, dtype=np.int32),
                context_lens=np.full(setting.batch, setting.context_len, np.int32),
                block_tables=tables,
                slot_mapping=tables[:, last // block_size].astype(np.int64) * block_size + last % block_size,
                positions=np.full(setting.batch, last, np.int64),
            )
        )
        generator = torch.Generator().manual_seed(0)
        self._q = torch.randn((setting.batch, setting.num_heads, setting.head_dim), generator=generator)
        self._q = self._q.to(setting.dtype)

    def attend(self) -> list[torch.Tensor]:
        """All layers, one after the other."""
        return [self._backend.attend(self._q, self.pool[:, layer], window=None) for layer in range(self._num_layers)]

    def seconds_per_layer(self) -> float:
        began = time.perf_counter()
        self.attend()
        return (time.perf_counter() - began) / self._num_layers


def memory_for(setting: KernelSetting, block_sizes: tuple[int, ...]) -> torch.Tensor:
    """[elements] `setting.dtype`, random: enough for a pool of any of these block sizes."""
    token = setting.num_layers * 2 * setting.num_kv_heads * setting.head_dim
    slots = max((setting.batch * -(-setting.context_len // size) + 1) * size for size in block_sizes)
    return torch.randn(slots * token, generator=torch.Generator().manual_seed(1)).to(setting.dtype)


def blocks_table(setting: KernelSetting, workload: Workload, num_slots: int, step_time: StepTime) -> Table:
    """Waste on the workload, and the kernel's time, for each block size; medians."""
    contiguous_size = setting.context_len
    memory = memory_for(setting, (*BLOCK_SIZES, contiguous_size))
    cases = {
        (size, scattered): DecodeCase(memory, setting, size, scattered=scattered)
        for size in BLOCK_SIZES
        for scattered in (True, False)
    }
    cases[contiguous_size, False] = DecodeCase(memory, setting, contiguous_size, scattered=False)
    seconds: dict[tuple[int, bool], list[float]] = {key: [] for key in cases}
    for case in cases.values():
        case.attend()
    for _ in range(_ROUNDS):
        for key, case in cases.items():
            seconds[key].append(case.seconds_per_layer())
    median = {key: statistics.median(values) for key, values in seconds.items()}
    best_size = min((size for size, scattered in median if not scattered), key=lambda size: median[size, False])
    best = median[best_size, False]

    dtype = str(setting.dtype).removeprefix("torch.")
    table = Table(
        f"block sizes, {dtype}",
        f"Block sizes: waste on {workload.name}, and decode attention of a layer, {dtype}, batch {setting.batch}, "
        f"context {setting.context_len:,}, one thread",
        COLUMNS,
        notes=[
            (
                f"best in a row: {1e6 * best:,.0f} µs with blocks of {best_size:,}, "
                f"{setting.layer_bytes / best / 1e9:.1f} GB/s; "
                f"one block of {contiguous_size:,} a request: {1e6 * median[contiguous_size, False]:,.0f} µs"
            ),
            "published: the paged kernel takes 20–26 % more than a contiguous one (Kwon et al., figure 18a)",
        ],
    )
    for size in BLOCK_SIZES:
        occupancy = simulate(PagedMemory(num_slots, size), workload.requests, step_time)
        granted = 1 - occupancy.free
        scattered, consecutive = median[size, True], median[size, False]
        table.add(
            size,
            100 * occupancy.tokens,
            100 * (1 - occupancy.tokens / granted),
            1e6 * scattered,
            1e6 * consecutive,
            scattered / consecutive,
            scattered / best,
        )
    return table

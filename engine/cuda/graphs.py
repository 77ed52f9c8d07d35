"""Decode steps as CUDA graphs: a step's hundreds of launches become one.

A step of decodes computes the same kernels every time; only what they read changes. So it is captured once for each of
a few batch sizes, and a step of n requests replays the graph of the next size, its last rows filled with requests that
do not exist: they have one token, in the null block, and nobody looks at what they give.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import AttentionBackend, AttentionMetadata
from engine.kvcache.block import NULL_BLOCK_ID

# Every launch saved is about as much time for one request as for many: sizes are dense where batches are small.
_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Graph(Protocol):
    """What was captured: `replay` computes `output` anew, from what its inputs hold now."""

    @property
    def output(self) -> torch.Tensor: ...

    @property
    def replay(self) -> Callable[[], None]: ...


@dataclass(frozen=True, slots=True, eq=False)
class _CapturedGraph:
    output: torch.Tensor
    replay: Callable[[], None]


class DecodeGraphs:
    """The graphs of one model over one pool, captured at once, largest first. Used by one thread at a time.

    Args:
        forward: (token_ids, positions, logit_rows) -> [num_rows, vocab_size]; the model's.
        attention: can replay, and is planned here.
        max_batch: requests of the largest graph.
        capture: makes a graph of a call; all graphs share their memory, so an output holds until the next replay.
    """

    def __init__(
        self,
        forward: Forward,
        attention: AttentionBackend,
        *,
        max_batch: int,
        device: torch.device,
        capture: Callable[[Callable[[], torch.Tensor]], Graph] | None = None,
    ) -> None:
        assert attention.can_replay, attention
        self.sizes = graph_sizes(max_batch)
        self._attention = attention
        self._token_ids = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_batch, dtype=torch.int64, device=device)
        rows = torch.arange(max_batch, device=device)
        capture = capture or _Capturer()
        self._graphs: dict[int, Graph] = {}
        for size in reversed(self.sizes):  # smaller ones fit into the memory of larger ones
            attention.plan(_nobody(size), replayed=True)

            def step(size: int = size) -> torch.Tensor:
                return forward(self._token_ids[:size], self._positions[:size], rows[:size])

            self._graphs[size] = capture(step)

    def takes(self, metadata: AttentionMetadata) -> bool:
        """Whether there is a graph for this step."""
        return metadata.num_decodes == metadata.num_requests <= self.sizes[-1]

    def run(self, token_ids: npt.NDArray[np.int64], metadata: AttentionMetadata) -> torch.Tensor:
        """The logits of all requests of the step, [num_requests, vocab_size] float32; valid until the next run."""
        num_requests = metadata.num_requests
        size = self.sizes[bisect_left(self.sizes, num_requests)]
        self._attention.plan(padded(metadata, size), replayed=True)
        self._token_ids[:num_requests].copy_(torch.from_numpy(token_ids))
        self._positions[:num_requests].copy_(torch.from_numpy(metadata.positions))
        graph = self._graphs[size]
        graph.replay()
        return graph.output[:num_requests]


def graph_sizes(max_batch: int) -> list[int]:
    """Batch sizes to capture, rising; the last is `max_batch`."""
    small = [size for size in _SMALL_SIZES if size < max_batch]
    return [*small, *range(_SIZE_STEP, max_batch, _SIZE_STEP), max_batch]


def padded(metadata: AttentionMetadata, size: int) -> AttentionMetadata:
    """A step of decodes, filled up to `size` requests: each new one has a single token, in the null block."""
    assert metadata.num_decodes == metadata.num_requests <= size, metadata
    extra = size - metadata.num_requests
    if extra == 0:
        return metadata
    width = metadata.block_tables.shape[1]
    null_tables = np.full((extra, width), NULL_BLOCK_ID, np.int32)
    return AttentionMetadata(
        num_decodes=size,
        query_start=np.arange(size + 1, dtype=np.int32),
        context_lens=np.concatenate([metadata.context_lens, np.ones(extra, np.int32)]),
        block_tables=np.concatenate([metadata.block_tables, null_tables]),
        # Slot 0 of the null block, all of them: what is written there is never looked at.
        slot_mapping=np.concatenate([metadata.slot_mapping, np.zeros(extra, np.int64)]),
        positions=np.concatenate([metadata.positions, np.zeros(extra, np.int64)]),
    )


def _nobody(size: int) -> AttentionMetadata:
    nothing = np.zeros(0, np.int64)
    none = AttentionMetadata(
        num_decodes=0,
        query_start=np.zeros(1, np.int32),
        context_lens=np.zeros(0, np.int32),
        block_tables=np.zeros((0, 1), np.int32),
        slot_mapping=nothing,
        positions=nothing,
    )
    return padded(none, size)


class _Capturer:
    """Captures with torch, all graphs into one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], torch.Tensor]) -> Graph:
        # Once before, on a stream of its own as capturing wants it: libraries allocate and compile at a first call.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step()
        return _CapturedGraph(output, graph.replay)

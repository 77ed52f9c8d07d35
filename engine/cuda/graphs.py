"""Decode steps as CUDA graphs: a step's hundreds of launches become one.

A step of decodes computes the same kernels every time; only what they read changes. So it is captured once for each of
a few batch sizes, and a step of n requests replays the graph of the next size, its last rows filled with requests that
do not exist: they have one token, in the null block, and nobody looks at what they give.
"""

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch

from engine.attention.backend import AttentionBackend, AttentionMetadata
from engine.kvcache.block import NULL_BLOCK_ID

# Every launch saved is about as much time for one request as for many: sizes are dense where batches are small.
_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


# Does what was captured once more, with what its tensors hold now. It keeps only memory that was made while
# capturing.
Replay = Callable[[], None]


class DecodeGraphs:
    """The graphs of one model over one pool, captured at once, largest first. Used by one thread at a time.

    Args:
        forward: (token_ids, positions, logit_rows) -> [num_rows, vocab_size]; the model's.
        attention: can replay, and is planned here.
        vocab_size: of the logits.
        max_batch: requests of the largest graph.
        capture: makes a graph of a call.
    """

    def __init__(
        self,
        forward: Forward,
        attention: AttentionBackend,
        *,
        vocab_size: int,
        max_batch: int,
        device: torch.device,
        capture: Callable[[Callable[[], None]], Replay] | None = None,
    ) -> None:
        assert attention.can_replay, attention
        self.sizes = graph_sizes(max_batch)
        self._attention = attention
        # What graphs read and write: they know addresses, and keep nothing alive.
        self._token_ids = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._rows = torch.arange(max_batch, device=device)
        self._logits = torch.empty(max_batch, vocab_size, dtype=torch.float32, device=device)
        capture = capture or _Capturer()
        self._replays: dict[int, Replay] = {}
        for size in reversed(self.sizes):  # smaller ones fit into the memory of larger ones
            attention.plan(_nobody(size), replayed=True)

            def step(size: int = size) -> None:
                logits = forward(self._token_ids[:size], self._positions[:size], self._rows[:size])
                self._logits[:size].copy_(logits)

            self._replays[size] = capture(step)

    def takes(self, metadata: AttentionMetadata) -> bool:
        """Whether there is a graph for this step."""
        return metadata.num_decodes == metadata.num_requests <= self.sizes[-1]

    def run(self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """The logits of all requests of the step, [num_requests, vocab_size] float32; valid until the next run.

        Args:
            token_ids, positions: [num_requests] int64, on the device.
        """
        num_requests = metadata.num_requests
        size = self.sizes[bisect_left(self.sizes, num_requests)]
        self._attention.plan(padded(metadata, size), replayed=True)
        self._token_ids[:num_requests].copy_(token_ids)
        self._positions[:num_requests].copy_(positions)
        self._replays[size]()
        return self._logits[:num_requests]


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
        # One for all: libraries make a workspace for each stream that they meet.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, step: Callable[[], None]) -> Replay:
        # Once before, on a stream of its own as capturing wants it: libraries allocate and compile at a first call.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            step()
        return graph.replay

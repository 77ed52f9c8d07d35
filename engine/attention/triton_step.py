"""A step where the Triton kernels read it: its work lists in one run of words, and room for what splits leave."""

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.backend import AttentionMetadata, AttentionShape
from engine.attention.triton_plan import Sections, max_splits, prefill_tiles, window_work


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWork:
    """The single queries' work in layers with one window."""

    splits: torch.Tensor
    merges: torch.Tensor
    num_splits: int  # at most
    num_merges: int  # 0: every request is of one split


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """A step on the device. Sections of words, int32, are as the kernels say; see `triton_plan`."""

    num_tokens: int
    num_tiles: int
    query_start: torch.Tensor
    slots: torch.Tensor
    tiles: torch.Tensor
    tables: torch.Tensor
    decodes: dict[int | None, DecodeWork]  # by window
    partial_out: torch.Tensor  # [num_slots, num_heads, head_dim] float32
    partial_stats: torch.Tensor  # [num_slots, num_heads, 2] float32
    largest_slot: int  # read as unsigned, so that a negative one is large
    largest_block: int


@dataclass(frozen=True, slots=True, eq=False)
class _Memory:
    words: torch.Tensor  # int32
    partial_out: torch.Tensor
    partial_stats: torch.Tensor


class StepPlanner:
    """Plans the steps of one model.

    Args:
        queries_per_tile: of chunks, for the heads of one KV head.
        device: where kernels run.
    """

    def __init__(self, shape: AttentionShape, *, queries_per_tile: int, device: torch.device) -> None:
        self._shape = shape
        self._queries_per_tile = queries_per_tile
        self._device = device
        self._windows = list(shape.windows)
        # By number of requests. Graphs have captured its addresses: it is never given back.
        self._replayed: dict[int, _Memory] = {}

    def plan(self, metadata: AttentionMetadata, *, replayed: bool) -> StepPlan:
        """As `AttentionBackend.plan`."""
        shape, num_requests = self._shape, metadata.num_requests
        tiles = prefill_tiles(metadata, self._queries_per_tile)
        work = [window_work(metadata, window) for window in self._windows]
        if replayed:
            assert metadata.num_decodes == num_requests, "chunks are not replayed"
            longest = int(metadata.context_lens.max(initial=0))
            assert longest <= shape.max_context_len, f"a context of {longest} tokens, at most {shape.max_context_len}"
            # Room for the longest contexts there may be, and launches that would do for them.
            num_splits = [num_requests * max_splits(shape.max_context_len, window) for window in self._windows]
            num_merges = [num_requests if n > num_requests else 0 for n in num_splits]
            num_slots = max(n if merges > 0 else 0 for n, merges in zip(num_splits, num_merges, strict=True))
            num_table_words = num_requests * -(-shape.max_context_len // shape.block_size)
        else:
            num_splits = [len(one.splits) for one in work]
            num_merges = [len(one.merges) if one.num_slots > 0 else 0 for one in work]
            num_slots = max(one.num_slots for one in work)
            num_table_words = metadata.block_tables.size
        sections = Sections.make(
            num_requests=num_requests,
            num_tokens=metadata.num_tokens,
            num_tiles=len(tiles),
            num_splits=num_splits,
            num_table_words=num_table_words,
        )
        # Fresh every step: the copy of the last one may still be under way.
        num_words = sections.used(metadata)
        host = torch.empty(num_words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        sections.fill(host.numpy(), metadata, tiles, work)
        if replayed:
            memory = self._memory_of(num_requests, sections.size, num_slots)
            memory.words[:num_words].copy_(host, non_blocking=True)
        else:
            memory = _Memory(host.to(self._device, non_blocking=True), *self._partials(num_slots))

        words = memory.words
        return StepPlan(
            num_tokens=metadata.num_tokens,
            num_tiles=len(tiles),
            query_start=words[sections.query_start],
            slots=words[sections.slots],
            tiles=words[sections.tiles],
            tables=words[sections.tables],
            decodes={
                window: DecodeWork(words[sections.splits[i]], words[sections.merges[i]], num_splits[i], num_merges[i])
                for i, window in enumerate(self._windows)
            },
            partial_out=memory.partial_out,
            partial_stats=memory.partial_stats,
            largest_slot=int(metadata.slot_mapping.view(np.uint64).max(initial=0)),
            largest_block=int(metadata.block_tables.view(np.uint32).max(initial=0)),
        )

    def _memory_of(self, num_requests: int, num_words: int, num_slots: int) -> _Memory:
        """Made at the first step of so many requests. Replays follow each other, so sizes may share one memory."""
        memory = self._replayed.get(num_requests)
        if memory is None:
            larger = [n for n in self._replayed if n > num_requests]
            if larger:
                memory = self._replayed[larger[0]]
            else:
                words = torch.zeros(num_words, dtype=torch.int32, device=self._device)
                memory = _Memory(words, *self._partials(num_slots))
            self._replayed[num_requests] = memory
        return memory

    def _partials(self, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        num_heads, head_dim = self._shape.num_heads, self._shape.head_dim
        return (
            torch.empty((num_slots, num_heads, head_dim), dtype=torch.float32, device=self._device),
            torch.empty((num_slots, num_heads, 2), dtype=torch.float32, device=self._device),
        )

"""The work of a step, as lists: which splits of which contexts, which tiles of which chunks, and where it all is.

All that the device reads of a step's metadata is made here as one run of int32, so that it goes up in one copy. It
consists of sections, each at a multiple of four words (16 bytes). A list starts with a word that says how long it is,
or how wide its rows are, and its entries of four words follow at the fourth.

Only NumPy: what a step looks like is decided without a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.attention.backend import AttentionMetadata

Ints = npt.NDArray[np.int32]

# A split is 256 keys: with 8 KV heads, a context of 4,096 then keeps 128 programs busy, and what is written between
# split and combination stays a few percent of what is read. Contexts of more than 64 · 256 have longer splits.
MIN_SPLIT_LEN = 256
MAX_SPLITS = 64


def max_splits(context_len: int, window: int | None) -> int:
    """Of any context of at most `context_len` tokens."""
    seen = context_len if window is None else min(context_len, window)
    return min(MAX_SPLITS, -(-seen // MIN_SPLIT_LEN))


@dataclass(frozen=True, slots=True, eq=False)
class WindowWork:
    """The work of all layers with one window. Chunks are requests with several queries, decodes those with one."""

    splits: Ints  # [num_splits, 4]: request, first key, end key, slot or -1 if it is the only one of its request
    merges: Ints  # [num_decodes, 4]: row of the batch, first slot, number of splits, 0
    num_slots: int  # for what splits of several leave to be combined


def window_work(metadata: AttentionMetadata, window: int | None) -> WindowWork:
    """Cuts the contexts of decodes; where depends on a context's length alone."""
    decodes = np.flatnonzero(np.diff(metadata.query_start) == 1).astype(np.int32)
    contexts = metadata.context_lens[decodes]
    seen = contexts if window is None else np.minimum(contexts, np.int32(min(window, 2**31 - 1)))
    split_len = np.full(len(decodes), MIN_SPLIT_LEN, np.int32)
    while (short := seen > split_len.astype(np.int64) * MAX_SPLITS).any():
        split_len[short] *= 2
    counts = -(-seen // split_len)

    # Requests with one split need no slots.
    slots_needed = np.where(counts > 1, counts, 0)
    first_slots = np.cumsum(slots_needed) - slots_needed
    owner = np.repeat(np.arange(len(decodes)), counts)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    first_keys = (contexts - seen)[owner] + index * split_len[owner]
    end_keys = np.minimum(first_keys + split_len[owner], contexts[owner])
    slots = np.where(counts[owner] > 1, first_slots[owner] + index, -1)
    return WindowWork(
        splits=_rows(decodes[owner], first_keys, end_keys, slots),
        merges=_rows(metadata.query_start[decodes], first_slots, counts, np.zeros(len(decodes))),
        num_slots=int(slots_needed.sum()),
    )


def prefill_tiles(metadata: AttentionMetadata, queries_per_tile: int) -> Ints:
    """[num_tiles, 4]: request, first row of the batch, number of queries, first position. Deepest context first."""
    query_lens = np.diff(metadata.query_start)
    chunks = np.flatnonzero(query_lens > 1)
    if len(chunks) == 0:
        return np.empty((0, 4), np.int32)
    counts = -(-query_lens[chunks] // queries_per_tile)
    owner = np.repeat(chunks, counts)
    begin = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries_per_tile
    num_queries = np.minimum(query_lens[owner] - begin, queries_per_tile)
    positions = metadata.context_lens[owner] - query_lens[owner] + begin
    tiles = _rows(owner, metadata.query_start[owner] + begin, num_queries, positions)
    return tiles[np.argsort(-positions, kind="stable")]


def _rows(*columns: npt.NDArray[np.generic]) -> Ints:
    rows = np.empty((len(columns[0]), len(columns)), np.int32)
    for i, column in enumerate(columns):
        rows[:, i] = column
    return rows


@dataclass(frozen=True, slots=True)
class Sections:
    """Where the sections are. That depends on what there is room for, not on what is there."""

    query_start: slice
    slots: slice
    tiles: slice
    splits: tuple[slice, ...]  # one for each window
    merges: tuple[slice, ...]
    tables: slice  # last: a step with short tables leaves its end unsent
    size: int

    @classmethod
    def make(
        cls, *, num_requests: int, num_tokens: int, num_tiles: int, num_splits: Sequence[int], num_table_words: int
    ) -> "Sections":
        """Room for so many of each."""
        end = 0

        def section(size: int) -> slice:
            nonlocal end
            start, end = end, end + -(-size // 4) * 4
            return slice(start, end)

        return cls(
            query_start=section(num_requests + 1),
            slots=section(num_tokens),
            tiles=section(4 + 4 * num_tiles),
            splits=tuple(section(4 + 4 * n) for n in num_splits),
            merges=tuple(section(4 + 4 * num_requests) for _ in num_splits),
            tables=section(4 + num_table_words),
            size=end,
        )

    def used(self, metadata: AttentionMetadata) -> int:
        """Words up to the end of the step's tables, those that `fill` needs."""
        return int(self.tables.start) + 4 + metadata.block_tables.size

    def fill(self, words: Ints, metadata: AttentionMetadata, tiles: Ints, work: Sequence[WindowWork]) -> None:
        """Writes a step into `words`."""

        def put(section: slice, values: Ints, head: int | None = None) -> None:
            start = section.start
            if head is not None:
                words[start] = head
                start += 4
            end = int(start + values.size)
            assert end <= section.stop, f"{values.size} words do not fit into {section}"
            words[start:end] = values.ravel()

        put(self.query_start, metadata.query_start)
        put(self.slots, metadata.slot_mapping.astype(np.int32))
        put(self.tiles, tiles, len(tiles))
        for one, splits, merges in zip(work, self.splits, self.merges, strict=True):
            put(splits, one.splits, len(one.splits))
            put(merges, one.merges, len(one.merges))
        put(self.tables, metadata.block_tables, metadata.block_tables.shape[1])

"""The work lists of a step: everything is attended once, and where contexts are cut is their own affair."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.backend import AttentionMetadata, build_metadata
from engine.attention.triton_plan import (
    MAX_SPLITS,
    MIN_SPLIT_LEN,
    Sections,
    max_splits,
    prefill_tiles,
    window_work,
)
from engine.executor import ScheduledRequest

BLOCK_SIZE = 16
contexts = st.integers(1, 3000) | st.integers(1, 140_000)
windows = st.none() | st.integers(1, 600) | st.integers(1, 200_000)
requests = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 300) | st.just(1)), min_size=1, max_size=6)


def metadata_of(lengths: list[tuple[int, int]]) -> AttentionMetadata:
    needed = [-(-(before + new) // BLOCK_SIZE) for before, new in lengths]
    return build_metadata(
        [
            ScheduledRequest(f"r{r}", [0] * new, before, (list(range(1, 1 + count)),), None)
            for r, ((before, new), count) in enumerate(zip(lengths, needed, strict=True))
        ],
        block_size=BLOCK_SIZE,
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(contexts, min_size=1, max_size=5), windows)
def test_splits_cover_what_each_query_sees_once_and_in_order(lengths: list[int], window: int | None) -> None:
    work = window_work(metadata_of([(n - 1, 1) for n in lengths]), window)
    used_slots: list[int] = []
    for r, n in enumerate(lengths):
        splits = work.splits[work.splits[:, 0] == r]
        assert splits[0, 1] == (0 if window is None else max(0, n - window))
        assert splits[-1, 2] == n
        assert (splits[1:, 1] == splits[:-1, 2]).all()
        assert (splits[:, 1] < splits[:, 2]).all()
        assert len(splits) <= max_splits(max(lengths), window) <= MAX_SPLITS
        row, first_slot, count, _ = work.merges[r]
        assert (row, count) == (r, len(splits))
        expected = [-1] if count == 1 else list(range(first_slot, first_slot + count))
        assert splits[:, 3].tolist() == expected
        used_slots += expected if count > 1 else []
    assert used_slots == list(range(work.num_slots))


@settings(max_examples=60, deadline=None)
@given(contexts, windows, requests)
def test_a_context_is_cut_alike_in_every_batch(length: int, window: int | None, mates: list[tuple[int, int]]) -> None:
    alone = window_work(metadata_of([(length - 1, 1)]), window)
    among = window_work(metadata_of([*mates, (length - 1, 1)]), window)
    same = among.splits[among.splits[:, 0] == len(mates)]
    assert same[:, 1:3].tolist() == alone.splits[:, 1:3].tolist()


@pytest.mark.parametrize(
    ("context", "num_splits"),
    [
        (1, 1),
        (MIN_SPLIT_LEN, 1),
        (MIN_SPLIT_LEN + 1, 2),
        (MIN_SPLIT_LEN * MAX_SPLITS, MAX_SPLITS),
        (MIN_SPLIT_LEN * MAX_SPLITS + 1, MAX_SPLITS // 2 + 1),
        (131_072, MAX_SPLITS),
    ],
)
def test_long_contexts_have_longer_splits_not_more(context: int, num_splits: int) -> None:
    assert len(window_work(metadata_of([(context - 1, 1)]), None).splits) == num_splits


@settings(max_examples=60, deadline=None)
@given(requests, st.integers(1, 128))
def test_tiles_cover_every_row_of_every_chunk_once(lengths: list[tuple[int, int]], queries_per_tile: int) -> None:
    metadata = metadata_of(lengths)
    seen = np.zeros(metadata.num_tokens, int)
    for request, row, num_queries, position in prefill_tiles(metadata, queries_per_tile).tolist():
        assert 1 <= num_queries <= queries_per_tile
        assert metadata.query_start[request] <= row
        assert row + num_queries <= metadata.query_start[request + 1]
        assert metadata.positions[row] == position
        seen[row : row + num_queries] += 1
    chunk_of_row = np.repeat(np.diff(metadata.query_start) > 1, np.diff(metadata.query_start))
    assert (seen == chunk_of_row).all()


def test_tiles_with_the_longest_way_come_first() -> None:
    tiles = prefill_tiles(metadata_of([(0, 70), (1000, 40), (500, 1)]), 32)
    assert tiles[:, 3].tolist() == [1032, 1000, 64, 32, 0]


def test_single_queries_behind_chunks_are_found() -> None:
    work = window_work(metadata_of([(4, 1), (0, 5), (300, 1)]), None)
    assert work.splits.tolist() == [[0, 0, 5, -1], [2, 0, 256, 0], [2, 256, 301, 1]]
    assert work.merges.tolist() == [[0, 0, 1, 0], [6, 0, 2, 0]]


def test_a_step_is_one_run_of_aligned_sections() -> None:
    metadata = metadata_of([(4, 1), (300, 1), (0, 5)])
    work = [window_work(metadata, window) for window in (None, 64)]
    tiles = prefill_tiles(metadata, 4)
    sections = Sections.make(
        num_requests=3,
        num_tokens=7,
        num_tiles=len(tiles),
        num_splits=[len(one.splits) for one in work],
        num_table_words=metadata.block_tables.size,
    )
    assert sections.used(metadata) <= sections.size
    words = np.full(sections.used(metadata), -7, np.int32)
    sections.fill(words, metadata, tiles, work)
    order = [sections.query_start, sections.slots, sections.tiles, *sections.splits, *sections.merges, sections.tables]
    assert order[0].start == 0
    assert order[-1].stop == sections.size
    for before, after in pairwise(order):
        assert before.stop == after.start
        assert after.start % 4 == 0
    assert words[sections.slots][:7].tolist() == metadata.slot_mapping.tolist()
    assert words[sections.tiles][:8].tolist() == [2, -7, -7, -7, 2, 6, 1, 4]
    assert words[sections.splits[0]][[0, *range(4, 16)]].tolist() == [3, 0, 0, 5, -1, 1, 0, 256, 0, 1, 256, 301, 1]
    assert words[sections.splits[1]][[0, *range(4, 12)]].tolist() == [2, 0, 0, 5, -1, 1, 237, 301, -1]
    assert words[sections.tables][[0, 4, 5, 23, 24]].tolist() == [19, 1, 0, 1, 2]


def test_a_step_without_requests_is_no_work() -> None:
    metadata = build_metadata([], block_size=BLOCK_SIZE)
    assert len(window_work(metadata, None).splits) == len(prefill_tiles(metadata, 8)) == 0

"""The arrays for FlashInfer, read back as its documentation says they are read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.backend import AttentionMetadata, build_metadata
from engine.attention.paged_indices import NUM_KINDS, ONE_QUERY, PagedStep, Part, paged_step
from engine.executor import ScheduledRequest


def metadata_of(lengths: list[tuple[int, int]], block_size: int) -> AttentionMetadata:
    """Of requests with (tokens computed before, tokens of this step), in blocks that all differ."""
    blocks = iter(range(1, 10_000))
    requests = [
        ScheduledRequest(
            f"r{i}", [0] * new, before, ([next(blocks) for _ in range(-(-(before + new) // block_size))],), None
        )
        for i, (before, new) in enumerate(lengths)
    ]
    return build_metadata(requests, block_size=block_size)


def slots_of(metadata: AttentionMetadata, r: int, block_size: int) -> list[int]:
    """Where a request's tokens are, first to last."""
    table = metadata.block_tables[r]
    return [int(table[p // block_size]) * block_size + p % block_size for p in range(metadata.context_lens[r])]


def documented_slots(part: Part, step: PagedStep, i: int, block_size: int) -> list[int]:
    """Of request i of a part: `indices[indptr[i] : indptr[i + 1]]`, all pages full but the last."""
    pages = step.kv_indices[part.pages][part.kv_indptr[i] : part.kv_indptr[i + 1]].tolist()
    # get_seq_lens of page.py
    seq_len = max(len(pages) - 1, 0) * block_size + int(part.last_page_len[i])
    return [pages[p // block_size] * block_size + p % block_size for p in range(seq_len)]


def documented_append(step: PagedStep, block_size: int) -> list[int]:
    """Slots that `append_paged_kv_cache` writes, a token each: its request's page that holds its position."""
    return [
        int(step.kv_indices[step.kv_indptr[r] + p // block_size]) * block_size + p % block_size
        for r, p in zip(step.batch_indices.tolist(), step.positions.tolist(), strict=True)
    ]


lengths = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 3, 5, 6, 16, 17, 30])), min_size=1, max_size=9
)


@given(lengths=lengths, block_size=st.sampled_from([1, 2, 16, 32]), group_size=st.sampled_from([1, 3, 4, 8]))
@settings(max_examples=300, deadline=None)
def test_what_flashinfer_reads_is_the_step(lengths: list[tuple[int, int]], block_size: int, group_size: int) -> None:
    metadata = metadata_of(lengths, block_size)
    step = paged_step(metadata, block_size=block_size, group_size=group_size)

    assert documented_append(step, block_size) == metadata.slot_mapping.tolist()
    # What get_batch_indices_positions would give of these lengths: the last of a request's positions.
    assert step.positions.tolist() == [p for b, n in lengths for p in range(b, b + n)]

    request_of_row = np.repeat(np.arange(len(lengths)), [n for _, n in lengths])
    seen: list[int] = []
    for part in step.parts:
        rows = np.arange(metadata.num_tokens)[part.rows]
        for i in range(part.num_requests):
            own = rows[part.qo_indptr[i] : part.qo_indptr[i + 1]]
            r = int(request_of_row[own[0]])
            assert own.tolist() == list(range(metadata.query_start[r], metadata.query_start[r + 1]))
            assert documented_slots(part, step, i, block_size) == slots_of(metadata, r, block_size)
            seen.append(r)
        assert part.qo_indptr[-1] == len(rows)
        assert part.kv_indptr[-1] == part.pages.stop - part.pages.start
    assert sorted(seen) == list(range(len(lengths)))


@given(lengths=lengths, group_size=st.sampled_from([1, 3, 4, 8]))
@settings(max_examples=200, deadline=None)
def test_the_size_of_a_requests_tiles_is_its_own(lengths: list[tuple[int, int]], group_size: int) -> None:
    """FlashInfer takes it from the average of a call: that must be what the request alone would get."""

    def tile(num_rows: int) -> int:
        return 16 if num_rows <= 16 else 64 if num_rows <= 64 else 128

    step = paged_step(metadata_of(lengths, 4), block_size=4, group_size=group_size)
    for part in step.parts:
        query_lens = np.diff(part.qo_indptr)
        assert {tile(n * group_size) for n in query_lens.tolist()} == {
            tile(int(query_lens.sum()) * group_size // len(query_lens))
        }
        assert (query_lens == 1).all() == (part.kind == ONE_QUERY) == (query_lens == 1).any()
    kinds = [part.kind for part in step.parts]
    assert kinds == sorted(set(kinds))
    assert max(kinds) < NUM_KINDS


def test_a_mixed_step_by_hand() -> None:
    # Blocks of 4: request 0 has blocks 1, 2; request 1 has 3; request 2 has 4, 5; request 3 has 6.
    metadata = metadata_of([(4, 1), (0, 3), (2, 4), (3, 1)], 4)
    step = paged_step(metadata, block_size=4, group_size=1)
    assert step.batch_indices.tolist() == [0, 2, 2, 2, 3, 3, 3, 3, 1]
    assert step.kv_indices.tolist() == [1, 2, 6, 3, 4, 5]
    assert step.kv_indptr.tolist() == [0, 2, 3, 4, 6]
    assert step.last_page_len.tolist() == [1, 4, 3, 2]
    decodes, chunks = step.parts
    assert isinstance(decodes.rows, np.ndarray)
    assert decodes.rows.tolist() == [0, 8]
    assert (decodes.qo_indptr.tolist(), decodes.kv_indptr.tolist()) == ([0, 1, 2], [0, 2, 3])
    assert chunks.rows == slice(1, 8)
    assert (chunks.qo_indptr.tolist(), chunks.kv_indptr.tolist()) == ([0, 3, 7], [0, 1, 3])
    assert chunks.last_page_len.tolist() == [3, 2]


@pytest.mark.parametrize("lengths", [[(5, 1), (9, 1)], [(5, 1), (0, 7)], [(0, 7), (3, 4)]])
def test_a_step_as_the_scheduler_makes_it_needs_no_gathering(lengths: list[tuple[int, int]]) -> None:
    step = paged_step(metadata_of(lengths, 4), block_size=4, group_size=1)
    assert all(isinstance(part.rows, slice) for part in step.parts)


def test_everything_is_int32_and_a_copy_of_its_own() -> None:
    metadata = metadata_of([(4, 1), (0, 3)], 4)
    step = paged_step(metadata, block_size=4, group_size=1)
    arrays = [step.batch_indices, step.positions, step.kv_indptr, step.kv_indices, step.last_page_len]
    arrays += [array for part in step.parts for array in (part.qo_indptr, part.kv_indptr, part.last_page_len)]
    for array in arrays:
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
        assert not np.shares_memory(array, metadata.block_tables)


def test_blocks_beyond_the_context_stay_out() -> None:
    metadata = metadata_of([(0, 1), (30, 1)], 4)
    assert metadata.block_tables.shape == (2, 8)
    step = paged_step(metadata, block_size=4, group_size=1)
    assert step.kv_indptr.tolist() == [0, 1, 9]
    assert 0 not in step.kv_indices

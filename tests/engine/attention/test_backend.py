"""The metadata of a step, against the block arithmetic by hand."""

import numpy as np
import pytest

from engine.attention.backend import build_metadata
from engine.executor import ScheduledRequest


def request(num_computed_tokens: int, num_new: int, *tables: list[int]) -> ScheduledRequest:
    return ScheduledRequest("r", list(range(num_new)), num_computed_tokens, tuple(tables), None)


def test_position_20_of_table_7_3_12_is_block_3_slot_4() -> None:
    metadata = build_metadata([request(20, 1, [7, 3, 12])], block_size=16)
    assert metadata.positions.tolist() == [20]
    assert metadata.slot_mapping.tolist() == [3 * 16 + 4]
    assert metadata.context_lens.tolist() == [21]


def test_metadata_names_every_token_of_a_mixed_batch() -> None:
    metadata = build_metadata(
        [request(4, 1, [9, 2]), request(0, 1, [5]), request(2, 3, [1, 8]), request(3, 1, [6])], block_size=4
    )
    assert metadata.num_decodes == 2
    assert metadata.query_start.tolist() == [0, 1, 2, 5, 6]
    assert metadata.context_lens.tolist() == [5, 1, 5, 4]
    assert metadata.block_tables.tolist() == [[9, 2], [5, 0], [1, 8], [6, 0]]
    assert metadata.positions.tolist() == [4, 0, 2, 3, 4, 3]
    assert metadata.slot_mapping.tolist() == [8, 20, 6, 7, 32, 27]
    assert (metadata.num_requests, metadata.num_tokens) == (4, 6)
    assert metadata.query_start.dtype == metadata.context_lens.dtype == metadata.block_tables.dtype == np.int32
    assert metadata.slot_mapping.dtype == metadata.positions.dtype == np.int64


def test_a_step_of_decodes_only_counts_them_all() -> None:
    assert build_metadata([request(4, 1, [9, 2]), request(1, 1, [5])], block_size=4).num_decodes == 2


def test_blocks_reserved_for_growth_stay_out() -> None:
    assert build_metadata([request(0, 4, [3, 4, 5])], block_size=4).block_tables.tolist() == [[3]]


def test_each_kv_cache_group_has_its_own_table() -> None:
    metadata = build_metadata([request(0, 1, [3], [4])], block_size=4, kv_cache_group=1)
    assert metadata.slot_mapping.tolist() == [16]


def test_a_table_too_short_for_its_request_is_refused() -> None:
    with pytest.raises(ValueError, match="request r: its block table has 1 blocks, needs 2"):
        build_metadata([request(4, 1, [3])], block_size=4)


def test_a_step_without_requests_is_empty() -> None:
    metadata = build_metadata([], block_size=4)
    assert (metadata.num_requests, metadata.num_tokens, metadata.num_decodes) == (0, 0, 0)

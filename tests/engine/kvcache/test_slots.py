"""The block arithmetic of the PagedAttention literature."""

from itertools import product

import pytest

from engine.kvcache.slots import locate, num_blocks_for, pool_offset, slot_index, slot_mapping, split_k_offset


def test_position_20_is_block_3_slot_4_when_table_is_7_3_12_and_blocks_have_16_tokens():
    assert locate(20, [7, 3, 12], 16) == (3, 4)
    assert slot_index(20, [7, 3, 12], 16) == 3 * 16 + 4


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_are_rounded_up_when_tokens_fill_the_last_in_part(num_tokens, num_blocks):
    assert num_blocks_for(num_tokens, 16) == num_blocks


def test_slot_mapping_follows_the_table_when_tokens_cross_a_block():
    assert slot_mapping(14, 4, [7, 3, 12], 16) == [7 * 16 + 14, 7 * 16 + 15, 3 * 16, 3 * 16 + 1]


def test_split_layout_starts_at_element_206880_when_block_3_head_5_slot_4():
    assert split_k_offset(3, 5, 4, num_heads=32, head_dim=128, block_size=16, x=8) == 206_880


def test_split_layout_is_a_bijection_when_all_indices_are_walked():
    shape = {"num_heads": 2, "head_dim": 8, "block_size": 4, "x": 4}
    offsets = {split_k_offset(b, h, s, d, **shape) for b, h, s, d in product(range(3), range(2), range(4), range(8))}
    assert offsets == set(range(3 * 2 * 4 * 8))


def test_pool_layout_is_row_major_when_all_indices_are_walked():
    shape = {"num_layers": 2, "num_heads": 3, "block_size": 4, "head_dim": 5}
    indices = product(range(2), range(2), range(2), range(3), range(4))
    assert [pool_offset(*index, **shape) for index in indices] == list(range(0, 2 * 2 * 2 * 3 * 4 * 5, 5))

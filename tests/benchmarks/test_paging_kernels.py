"""What the paging benchmark times computes the right thing; mapped pages are where they should be."""

import ctypes

import numpy as np
import pytest
import torch

from benchmarks.paging.blocks import DecodeCase, KernelSetting, memory_for
from benchmarks.paging.layouts import laid_out, scorers
from benchmarks.paging.mapped_range import HUGE_PAGE, SMALL_PAGE, MappedRange, PagePool
from benchmarks.paging.virtual import KVShape, growth_table


@pytest.mark.parametrize("layout", ["head-major", "token-major", "x-split"])
def test_every_layout_gives_the_scores(layout: str) -> None:
    num_blocks, num_kv_heads, block_size, head_dim, group_size, context_len = 7, 2, 6, 8, 3, 22
    generator = np.random.default_rng(0)
    keys = generator.standard_normal((num_blocks, num_kv_heads, block_size, head_dim), np.float32)
    q = generator.standard_normal((num_kv_heads, group_size, head_dim), np.float32)
    table = np.array([5, 0, 3, 6], np.int32)
    scores = np.full((num_kv_heads, group_size, context_len), np.nan, np.float32)

    score = scorers(block_size, num_kv_heads, head_dim)[layout]
    score(q, laid_out(keys, layout), table, context_len, scores)

    rows = keys[table].transpose(1, 0, 2, 3).reshape(num_kv_heads, -1, head_dim)[:, :context_len]
    np.testing.assert_allclose(scores, np.einsum("khd,ktd->kht", q, rows), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("block_size", "scattered"), [(1, True), (16, True), (16, False), (21, False)])
def test_a_timed_case_attends_over_all_keys_that_it_should(block_size: int, scattered: bool) -> None:
    setting = KernelSetting(torch.float32, batch=2, context_len=21, num_layers=2, head_dim=16)
    memory = memory_for(setting, (block_size,))
    case = DecodeCase(memory, setting, block_size, scattered=scattered)
    # Values of one: whatever the weights are, they must sum to one over exactly the context.
    case.pool[:, :, 1] = 1.0
    case.pool[0] = float("nan")  # the null block
    for out in case.attend():
        torch.testing.assert_close(out, torch.ones_like(out))
    assert case.seconds_per_layer() > 0


@pytest.mark.parametrize("huge", [False, True])
def test_pages_of_a_pool_appear_in_the_order_in_which_they_are_mapped(huge: bool) -> None:
    with PagePool(3, huge=huge) as pool, MappedRange(3 * pool.page_size, pool.page_size) as mapped:
        assert pool.page_size == (HUGE_PAGE if huge else SMALL_PAGE)
        for number, page in enumerate((2, 0)):
            address = mapped.map_next(pool.fd, page)
            assert address == mapped.address + number * pool.page_size
            ctypes.memset(address, 10 + page, pool.page_size)
        # One run of addresses over pages that lie apart.
        held = ctypes.string_at(mapped.address, 2 * pool.page_size)
        assert held == bytes([12]) * pool.page_size + bytes([10]) * pool.page_size
        mapped.clear()
        assert ctypes.string_at(mapped.map_next(pool.fd, 0), 1) == bytes([10])
        assert ctypes.string_at(mapped.map_next(pool.fd, 1), 1) == bytes([1])  # as it was made


def test_a_range_that_is_full_takes_no_page_more() -> None:
    with PagePool(2, huge=False) as pool, MappedRange(1, SMALL_PAGE) as mapped:
        mapped.map_next(pool.fd, 0)
        with pytest.raises(AssertionError, match="all 1 pages are mapped"):
            mapped.map_next(pool.fd, 1)
        mapped.close()
        mapped.close()


def test_the_cost_of_growing_counts_every_page_once() -> None:
    table = growth_table(KVShape("small", num_layers=1, vector_bytes=512), num_tokens=40)
    calls = dict(zip(table.column("memory"), table.column("mmap calls"), strict=True))
    # 40 tokens of 512 bytes are five small pages in each of two ranges; of 1,024 bytes ten in one.
    assert calls["2 ranges, 4 KiB"] == calls["1 range, 4 KiB"] == 10 / 40
    assert [calls[name] for name in calls if "2 MiB" in str(name)] == [2 / 40, 1 / 40]
    assert all(isinstance(cost, float) and cost > 0 for cost in table.column("map or allocate, µs"))

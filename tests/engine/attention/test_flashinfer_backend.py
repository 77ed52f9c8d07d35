"""What is FlashInfer's own beside the suite of all backends: refusals, 8-bit pools, steps that are replayed."""

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import fake_flashinfer
from engine.attention import get_backend
from engine.attention.backend import AttentionShape, KVScales, build_metadata
from engine.attention.flashinfer_backend import FlashInferBackend
from engine.cuda.graphs import padded
from engine.executor import ScheduledRequest

SHAPE = AttentionShape(
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    block_size=4,
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    scale=0.125,
    windows=frozenset({None, 5}),
    max_context_len=64,
)
NUM_BLOCKS = 40


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)


def prepared(shape: AttentionShape = SHAPE) -> FlashInferBackend:
    backend = FlashInferBackend(device="cpu")
    backend.prepare(shape)
    return backend


def decode(before: int, *table: int) -> ScheduledRequest:
    return ScheduledRequest("r", [0], before, (table,), None)


def random_pool(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    pool = torch.randn((NUM_BLOCKS, 2, 2, 4, 64), generator=torch.Generator().manual_seed(0))
    return pool.to(dtype)


def tokens(n: int, num_heads: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((n, num_heads, 64), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


# --- what it refuses


def test_float32_is_refused_and_triton_is_named(flashinfer: None) -> None:
    shape = replace(SHAPE, dtype=torch.float32, kv_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"bfloat16 or float16, not torch\.float32: use triton"):
        prepared(shape)


@pytest.mark.parametrize("head_dim", [16, 32, 80, 96, 192])
def test_a_head_dim_without_kernels_is_refused(flashinfer: None, head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim must be one of 64, 128, 256, not {head_dim}"):
        prepared(replace(SHAPE, head_dim=head_dim))


def test_a_pool_of_another_type_is_refused(flashinfer: None) -> None:
    with pytest.raises(ValueError, match=r"KV must be torch\.bfloat16 or float8_e4m3fn, not torch\.float16"):
        prepared(replace(SHAPE, kv_dtype=torch.float16))


def test_a_machine_without_flashinfer_is_told_so() -> None:
    with pytest.raises(ValueError, match="the package flashinfer-python is not installed; triton needs none of it"):
        get_backend("flashinfer", device="cpu").prepare(SHAPE)


def test_importing_the_backend_imports_no_flashinfer() -> None:
    code = "import sys, engine.attention.flashinfer_backend as _; print('flashinfer' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == "False\n"


# --- an 8-bit pool


def test_an_8_bit_pool_holds_computed_over_scale_and_is_read_back_so(flashinfer: None) -> None:
    shape = replace(SHAPE, kv_dtype=torch.float8_e4m3fn, windows=frozenset({None}))
    scales = KVScales(k=0.5, v=0.25)
    requests = [decode(6, 3, 7), ScheduledRequest("c", [0] * 3, 2, ((9, 4),), None)]
    metadata = build_metadata(requests, block_size=4)
    q, k, v = tokens(4, 8), tokens(4, 2, seed=2), tokens(4, 2, seed=3)
    outcomes = []
    for backend in (prepared(shape), get_backend("reference")):
        pool = random_pool(torch.float8_e4m3fn)
        backend.prepare(shape)
        backend.plan(metadata)
        backend.write_kv(pool, k, v, scales=scales)
        outcomes.append((pool, backend.attend(q, pool, window=None, scales=scales)))
    (pool, result), (expected_pool, expected) = outcomes
    assert torch.equal(pool.view(torch.uint8), expected_pool.view(torch.uint8))
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


def test_what_is_too_large_for_8_bits_becomes_the_largest(flashinfer: None) -> None:
    shape = replace(SHAPE, kv_dtype=torch.float8_e4m3fn)
    backend = prepared(shape)
    pool = random_pool(torch.float8_e4m3fn)
    backend.plan(build_metadata([decode(0, 3)], block_size=4))
    k = torch.full((1, 2, 64), 1000.0, dtype=torch.bfloat16)
    backend.write_kv(pool, k, -k)
    assert (pool[3, 0, :, 0].float() == 448).all()
    assert (pool[3, 1, :, 0].float() == -448).all()


# --- steps that are replayed


class Recorded:
    """A CUDA graph in play: the calls of a step, made again over the same tensors."""

    def __init__(self, backend: FlashInferBackend, pool: torch.Tensor, size: int) -> None:
        self.q, self.k, self.v = tokens(size, 8), tokens(size, 2), tokens(size, 2)
        self._pool, self._backend = pool, backend
        # What the calls go through at the time of capture, not what a later plan puts in its place.
        self._indices, self._parts = backend._indices, backend._parts

    def replay(self) -> dict[int | None, torch.Tensor]:
        played = FlashInferBackend(device="cpu")
        played._flashinfer, played._indices, played._parts = self._backend._flashinfer, self._indices, self._parts
        played.write_kv(self._pool, self.k, self.v)
        return {window: played.attend(self.q, self._pool, window=window) for window in SHAPE.windows}


def test_a_captured_step_replays_with_other_requests(flashinfer: None) -> None:
    backend, plain = prepared(), prepared()
    pool = random_pool()
    graphs: dict[int, Recorded] = {}
    for size in (4, 2, 1):  # the largest first, as graphs are captured
        nobody = padded(build_metadata([], block_size=4), size)
        backend.plan(nobody, replayed=True)
        graphs[size] = Recorded(backend, pool, size)

    steps = [
        (4, [decode(9, 5, 6, 7), decode(0, 8), decode(3, 10)]),
        (2, [decode(30, *range(11, 19)), decode(4, 20, 21)]),
        (4, [decode(63, *range(22, 38)), decode(1, 8), decode(12, 5, 6, 7, 9), decode(0, 38)]),
        (1, [decode(7, 20, 21)]),
    ]
    for seed, (size, requests) in enumerate(steps):
        metadata = build_metadata(requests, block_size=4)
        graph, n = graphs[size], len(requests)
        graph.q.copy_(tokens(size, 8, seed=10 + seed))
        graph.k.copy_(tokens(size, 2, seed=20 + seed))
        graph.v.copy_(tokens(size, 2, seed=30 + seed))
        backend.plan(padded(metadata, size), replayed=True)
        results = graph.replay()

        expected_pool = pool.clone()
        plain.plan(metadata)
        plain.write_kv(expected_pool, graph.k[:n], graph.v[:n])
        for window, result in results.items():
            # The same bits as in a step that is not replayed.
            assert torch.equal(result[:n], plain.attend(graph.q[:n], expected_pool, window=window))
        assert torch.equal(pool[1:], expected_pool[1:])  # but for the null block, where padding goes


def test_a_larger_graph_than_any_before_gets_buffers_of_its_own(flashinfer: None) -> None:
    backend = prepared()
    pool = random_pool()
    backend.plan(padded(build_metadata([], block_size=4), 1), replayed=True)
    small = Recorded(backend, pool, 1)
    backend.plan(padded(build_metadata([], block_size=4), 3), replayed=True)
    metadata = build_metadata([decode(7, 20, 21)], block_size=4)
    backend.plan(metadata, replayed=True)
    result = small.replay()[None]
    plain = prepared()
    plain.plan(metadata)
    assert torch.equal(result, plain.attend(small.q, pool, window=None))


def test_a_replayed_request_longer_than_any_may_be_is_seen(flashinfer: None) -> None:
    backend = prepared()
    metadata = build_metadata([decode(64, *range(1, 18))], block_size=4)
    with pytest.raises(AssertionError, match="17 blocks, 16 were said to be the most"):
        backend.plan(metadata, replayed=True)


def test_chunks_are_not_replayed(flashinfer: None) -> None:
    metadata = build_metadata([ScheduledRequest("r", [0] * 2, 0, ((1,),), None)], block_size=4)
    with pytest.raises(AssertionError, match="only decodes are replayed"):
        prepared().plan(metadata, replayed=True)


# --- what a request's bits depend on


def outcome(backend: FlashInferBackend, requests: list[ScheduledRequest], r: int) -> torch.Tensor:
    metadata = build_metadata(requests, block_size=4)
    backend.plan(metadata)
    q = torch.zeros((metadata.num_tokens, 8, 64), dtype=torch.bfloat16)
    rows = slice(int(metadata.query_start[r]), int(metadata.query_start[r + 1]))
    q[rows] = tokens(rows.stop - rows.start, 8)
    return backend.attend(q, random_pool(), window=None)[rows]


@pytest.mark.parametrize("num_queries", [1, 3, 12, 30])
def test_chunks_of_any_length_beside_a_request_change_no_bit_of_it(flashinfer: None, num_queries: int) -> None:
    backend = prepared()
    own = ScheduledRequest("r", [0] * num_queries, 10, (tuple(range(1, 11)),), None)
    mates = [ScheduledRequest("m", [0] * n, 0, (tuple(range(20, 36)),), None) for n in (2, 10, 60)]
    alone = outcome(backend, [own], 0)
    assert not alone.isnan().any()
    for requests, r in (([own, *mates], 0), ([*mates, own], 3), ([mates[2], own], 1), ([own, own], 1)):
        assert torch.equal(outcome(backend, requests, r), alone)


def test_with_split_contexts_bits_depend_on_batch_mates(flashinfer: None) -> None:
    """So that it is known what `split_kv` gives up, and that the test above can fail."""
    backend = FlashInferBackend(device="cpu", split_kv=True)
    backend.prepare(SHAPE)
    own = decode(39, *range(1, 11))
    alone, beside = outcome(backend, [own], 0), outcome(backend, [own] * 9, 0)
    assert not torch.equal(alone, beside)
    torch.testing.assert_close(alone, beside, rtol=2e-2, atol=2e-2)


def test_a_window_not_asked_for_at_the_start_is_not_served(flashinfer: None) -> None:
    backend = prepared()
    backend.plan(build_metadata([decode(7, 1, 2)], block_size=4))
    assert not math.isnan(float(backend.attend(tokens(1, 8), random_pool(), window=5).sum()))
    with pytest.raises(KeyError):
        backend.attend(tokens(1, 8), random_pool(), window=6)


# --- the one that plays FlashInfer


def planned(wrapper: fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper, num_requests: int = 1, **options: Any) -> None:
    wrapper.plan(
        torch.arange(num_requests + 1, dtype=torch.int32),
        torch.arange(num_requests, dtype=torch.int32),
        torch.ones(num_requests, dtype=torch.int32),
        8,
        2,
        64,
        4,
        **{"q_data_type": torch.bfloat16, **options},
    )


def decode_wrapper(**options: Any) -> fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper:
    workspace = torch.zeros(fake_flashinfer.WORKSPACE_BYTES, dtype=torch.uint8)
    return fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "HND", **{"use_tensor_cores": True, "backend": "fa2", **options}
    )


def test_a_run_is_refused_before_a_plan_and_with_what_was_not_planned() -> None:
    wrapper, pool = decode_wrapper(), random_pool()
    with pytest.raises(AssertionError, match="run before plan"):
        wrapper.run(tokens(1, 8), pool)
    planned(wrapper)
    for q, kv in ((tokens(2, 8), pool), (tokens(1, 8).half(), pool), (tokens(1, 8), pool.half())):
        with pytest.raises(ValueError, match="planned for"):
            wrapper.run(q, kv)


@pytest.mark.parametrize("options", [{"use_tensor_cores": False}, {"backend": "auto"}], ids=str)
def test_wrappers_that_switch_kernels_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        decode_wrapper(**options)


def test_a_graphs_wrapper_keeps_its_batch_size_and_its_room() -> None:
    def ints(n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.int32)

    wrapper = decode_wrapper(
        use_cuda_graph=True,
        paged_kv_indptr_buffer=ints(3),
        paged_kv_indices_buffer=ints(2),
        paged_kv_last_page_len_buffer=ints(2),
    )
    planned(wrapper, 2)
    with pytest.raises(ValueError, match="a graph of 2 requests is planned for 1"):
        planned(wrapper, 1)
    with pytest.raises(ValueError, match="3 indices for a buffer of 2"):
        wrapper.plan(
            torch.tensor([0, 1, 3], dtype=torch.int32), ints(3), ints(2) + 1, 8, 2, 64, 4, q_data_type=torch.bfloat16
        )

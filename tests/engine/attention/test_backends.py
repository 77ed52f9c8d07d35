"""One suite over every attention backend, against plain NumPy written from the definition."""

import math
import threading
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

import fake_flashinfer
from engine.attention import BACKENDS, get_backend
from engine.attention.backend import AttentionBackend, AttentionShape, build_metadata
from engine.attention.cpu import CpuBackend
from engine.cpu_tiles import has_tiles
from engine.executor import ScheduledRequest

# The backend of CPUs is two: by wide vectors, where this CPU has them, and for any.
IMPLEMENTATIONS = [(name, 1) for name in BACKENDS] + [("cpu", 2), ("cpu on any CPU", 1), ("cpu on any CPU", 2)]


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda p: f"{p[0]}-{p[1]}")
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    name, num_threads = request.param
    if name == "flashinfer":
        fake_flashinfer.install(monkeypatch)
    if name == "cpu on any CPU":
        return CpuBackend(num_threads=num_threads, tiles=False)
    return get_backend(name, num_threads=num_threads)


def dtypes_of(backend: AttentionBackend) -> list[torch.dtype]:
    """That it computes in, the most exact first."""
    return [torch.bfloat16] if type(backend).__name__ == "FlashInferBackend" else [torch.float32, torch.bfloat16]


def skip_unless_served(backend: AttentionBackend, dtype: torch.dtype, head_dim: int = 64) -> None:
    if type(backend).__name__ == "FlashInferBackend" and (dtype not in dtypes_of(backend) or head_dim % 64 > 0):
        pytest.skip("FlashInfer has no kernels for that; test_flashinfer_backend.py sees it refused")


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Step:
    """A step over a pool that holds NaN wherever no query may look: a wrong read is seen in the result."""

    def __init__(
        self,
        heads: Heads,
        lengths: list[tuple[int, int]],  # (tokens computed before, tokens of this step) of each request
        *,
        block_size: int = 16,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        num_spare_blocks: int = 3,
        is_prompt: bool = False,
    ) -> None:
        self.heads, self.block_size, self.window = heads, block_size, window
        self.scale = heads.head_dim**-0.5
        # Contents are seeded by request, the places by the step: the same request can be met again elsewhere.
        contents = [torch.Generator().manual_seed(1000 + r) for r in range(len(lengths))]
        places = np.random.default_rng(seed)

        needed = [-(-(before + new) // block_size) for before, new in lengths]
        num_blocks = 1 + sum(needed) + num_spare_blocks
        free = (places.permutation(num_blocks - 1) + 1).tolist()
        tables = [[free.pop() for _ in range(n)] for n in needed]
        # Two spare blocks of growth in the table: reserved, not yet meaningful.
        requests = [
            ScheduledRequest(f"r{r}", [0] * new, before, (table + free[:2],), None, is_prompt)
            for r, ((before, new), table) in enumerate(zip(lengths, tables, strict=True))
        ]
        self.metadata = build_metadata(requests, block_size=block_size)

        num_layers, self.layer = 3, 1
        self.pool = torch.full(
            (num_blocks, num_layers, 2, heads.num_kv_heads, block_size, heads.head_dim), math.nan, dtype=dtype
        )
        self.keys, self.values, queries = [], [], []
        for (before, new), table, generator in zip(lengths, tables, contents, strict=True):
            shape = (before + new, heads.num_kv_heads, heads.head_dim)
            k = torch.randn(shape, generator=generator).to(dtype)
            v = torch.randn(shape, generator=generator).to(dtype)
            queries.append(torch.randn((new, heads.num_heads, heads.head_dim), generator=generator).to(dtype))
            for p in range(before):
                if window is None or p > before - window:  # what has left the window has been given back
                    self.pool[table[p // block_size], self.layer, 0, :, p % block_size] = k[p]
                    self.pool[table[p // block_size], self.layer, 1, :, p % block_size] = v[p]
            self.keys.append(k)
            self.values.append(v)
        self.q = torch.cat(queries)
        self.new_k = torch.cat([k[before:] for k, (before, _) in zip(self.keys, lengths, strict=True)])
        self.new_v = torch.cat([v[before:] for v, (before, _) in zip(self.values, lengths, strict=True)])

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            *self.heads,
            block_size=self.block_size,
            dtype=self.q.dtype,
            kv_dtype=self.pool.dtype,
            scale=self.scale,
            windows=frozenset({self.window}),
        )

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        layer = self.pool[:, self.layer]
        backend.prepare(self.shape)
        backend.plan(self.metadata)
        backend.write_kv(layer, self.new_k, self.new_v)
        return backend.attend(self.q, layer, window=self.window)

    def expected(self) -> npt.NDArray[np.float64]:
        """softmax(q · k / √d) · v over the visible keys, in float64, one query and head after the other."""
        group_size = self.heads.num_heads // self.heads.num_kv_heads
        out = np.zeros(self.q.shape)
        for r, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            k64, v64 = k.double().numpy(), v.double().numpy()
            for row in range(self.metadata.query_start[r], self.metadata.query_start[r + 1]):
                last = int(self.metadata.positions[row])
                first = 0 if self.window is None else max(0, last - self.window + 1)
                for h in range(self.heads.num_heads):
                    kv_head = h // group_size
                    scores = k64[first : last + 1, kv_head] @ self.q[row, h].double().numpy() * self.scale
                    weights = np.exp(scores - scores.max())
                    out[row, h] = weights @ v64[first : last + 1, kv_head] / weights.sum()
        return out

    def rows(self, r: int) -> slice:
        return slice(int(self.metadata.query_start[r]), int(self.metadata.query_start[r + 1]))


def assert_close(actual: torch.Tensor, expected: npt.NDArray[np.float64]) -> None:
    tolerance = 1e-5 if actual.dtype == torch.float32 else 2e-2
    np.testing.assert_allclose(actual.float().numpy(), expected, rtol=tolerance, atol=tolerance)


SMOLLM = Heads(9, 3, 64)
MIXED = [(20, 1), (0, 1), (63, 1), (0, 33), (16, 16), (7, 2)]


@pytest.mark.parametrize(
    "heads",
    [SMOLLM, Heads(4, 4, 64), Heads(8, 1, 128), Heads(6, 2, 80), Heads(4, 2, 96), Heads(5, 1, 32), Heads(14, 2, 16)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_the_definition_for_all_head_shapes(
    backend: AttentionBackend, heads: Heads, dtype: torch.dtype
) -> None:
    skip_unless_served(backend, dtype, heads.head_dim)
    step = Step(heads, MIXED, dtype=dtype)
    assert_close(step.run(backend), step.expected())


@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 40, 1000])
def test_attention_is_the_definition_for_all_block_sizes_and_windows(
    backend: AttentionBackend, block_size: int, window: int | None
) -> None:
    b = block_size
    ragged = [(n - 1, 1) for n in (1, b - 1, b, b + 1, 2 * b + 3, 70) if n >= 1]
    step = Step(
        SMOLLM,
        [*ragged, (0, b + 1), (b, b), (b - 1, 2), (50, 7)],
        block_size=b,
        window=window,
        dtype=dtypes_of(backend)[0],
    )
    assert_close(step.run(backend), step.expected())


def test_attention_is_the_definition_in_a_long_context(backend: AttentionBackend) -> None:
    step = Step(SMOLLM, [(4099, 1), (1000, 3)], dtype=dtypes_of(backend)[0])
    assert_close(step.run(backend), step.expected())


def test_keys_are_written_into_their_slots_and_nowhere_else(backend: AttentionBackend) -> None:
    step = Step(SMOLLM, MIXED, num_spare_blocks=5, dtype=dtypes_of(backend)[0])
    before = step.pool.clone()
    step.run(backend)
    expected = before.clone()
    for i, slot in enumerate(step.metadata.slot_mapping.tolist()):
        block_id, offset = divmod(slot, step.block_size)
        expected[block_id, step.layer, 0, :, offset] = step.new_k[i]
        expected[block_id, step.layer, 1, :, offset] = step.new_v[i]
    torch.testing.assert_close(step.pool, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_result_is_the_same_in_every_bit_whatever_the_batch_mates_and_block_ids(
    backend: AttentionBackend, window: int | None, dtype: torch.dtype
) -> None:
    skip_unless_served(backend, dtype)
    lengths = [(20, 1), (0, 1), (63, 1), (300, 1), *[(17 + i, 1) for i in range(9)], (0, 33), (16, 16), (40, 9)]
    together = Step(SMOLLM, lengths, window=window, dtype=dtype)
    result = together.run(backend)
    # Triton's interpreter takes its time: every third.
    step = 3 if type(backend).__name__ == "TritonBackend" else 1
    for r in range(len(lengths) - 1, -1, -step):
        before, new = lengths[r]
        # Contents are seeded by place in the list: other mates, so, and other places in the pool.
        mates = [(3, 1)] * r
        alone = Step(SMOLLM, [*mates, (before, new)], window=window, dtype=dtype, seed=r + 1, num_spare_blocks=r)
        torch.testing.assert_close(alone.run(backend)[alone.rows(r)], result[together.rows(r)], rtol=0, atol=0)


def test_which_requests_threads_share_is_theirs_to_say_and_not_their_mates() -> None:
    """Long ones are shared, and on some CPUs the kernel for several threads rounds otherwise."""
    backend = get_backend("cpu", num_threads=2)
    lengths = [(n, 1) for n in (5, 700, 64, 1500, 33)]
    together = Step(SMOLLM, lengths).run(backend)
    for r in range(len(lengths)):
        alone = Step(SMOLLM, [*[(3, 1)] * r, lengths[r]], seed=r)
        torch.testing.assert_close(alone.run(backend)[r], together[r], rtol=0, atol=0)


def test_threads_change_nothing_beyond_rounding_on_any_cpu() -> None:
    """There the kernel for one thread and the one for several are compiled each for itself: last bits may differ."""
    lengths = [(n, 1) for n in (5, 700, 64, 1, 33, 16, 15, 120, 3)]
    one = Step(SMOLLM, lengths).run(CpuBackend(num_threads=1, tiles=False))
    two = Step(SMOLLM, lengths).run(CpuBackend(num_threads=2, tiles=False))
    few = Step(SMOLLM, lengths[:2]).run(CpuBackend(num_threads=2, tiles=False))
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(few, one[:2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_no_bit_of_a_decode_by_wide_vectors(dtype: torch.dtype) -> None:
    if not has_tiles(dtype):
        pytest.skip(f"this CPU has no tiles of {dtype}")
    lengths = [(n, 1) for n in (5, 700, 64, 1, 33, 16, 15, 120, 3, 1500)]
    one, two = (Step(SMOLLM, lengths, dtype=dtype).run(get_backend("cpu", num_threads=n)) for n in (1, 2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_how_a_prompt_is_cut_into_chunks_changes_no_bit(dtype: torch.dtype, window: int | None) -> None:
    """By wide vectors: every query's sums begin at position 0."""
    if not has_tiles(dtype):
        pytest.skip(f"this CPU has no tiles of {dtype}")
    whole = Step(SMOLLM, [(0, 117)], window=window, dtype=dtype)
    result = whole.run(get_backend("cpu"))
    for first in (2, 16, 63, 100, 116):
        rest = Step(SMOLLM, [(first, 117 - first)], window=window, dtype=dtype, seed=first, is_prompt=True)
        rest.q = whole.q[first:]
        torch.testing.assert_close(rest.run(get_backend("cpu")), result[first:], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_no_bit_of_a_chunk(dtype: torch.dtype) -> None:
    lengths = [(0, 33), (16, 16), (40, 9)]
    one, two = (Step(SMOLLM, lengths, dtype=dtype).run(get_backend("cpu", num_threads=n)) for n in (1, 2))
    torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_a_query_of_one_token_is_attended_alike_as_decode_and_as_last_chunk(backend: AttentionBackend) -> None:
    # A chunk of one token may stand behind longer ones: its place in the batch decides nothing.
    first = Step(SMOLLM, [(20, 1), (5, 4)], dtype=dtypes_of(backend)[0])
    behind = Step(SMOLLM, [(7, 4), (5, 4), (20, 1)], dtype=dtypes_of(backend)[0])
    for step, r in ((first, 0), (behind, 2)):
        step.q[step.rows(r)] = 0.25
        step.run(backend)
    k, v, q = first.keys[0], first.values[0], first.q[first.rows(0)]
    for p in range(21):
        block_id, offset = int(behind.metadata.block_tables[2, p // 16]), p % 16
        behind.pool[block_id, 1, 0, :, offset] = k[p]
        behind.pool[block_id, 1, 1, :, offset] = v[p]
    behind.q[behind.rows(2)] = q
    backend.prepare(behind.shape)
    backend.plan(behind.metadata)
    result = backend.attend(behind.q, behind.pool[:, 1], window=None)
    torch.testing.assert_close(result[behind.rows(2)], first.run(backend)[first.rows(0)], rtol=0, atol=0)


def test_queries_and_keys_may_be_views_of_one_fused_projection(backend: AttentionBackend) -> None:
    step = Step(SMOLLM, MIXED, dtype=dtypes_of(backend)[0])
    expected = step.expected()
    fused = torch.cat([step.q, step.new_k, step.new_v], dim=1)
    step.q, step.new_k, step.new_v = fused.split([9, 3, 3], dim=1)
    assert not step.q.is_contiguous()
    assert_close(step.run(backend), expected)


def test_padding_of_block_tables_is_never_read(backend: AttentionBackend) -> None:
    step = Step(SMOLLM, [(20, 1), (200, 1), (0, 5)], dtype=dtypes_of(backend)[0])
    assert (step.metadata.block_tables[0, 2:] == 0).all()
    assert torch.isnan(step.pool[0]).all()
    assert_close(step.run(backend), step.expected())


def test_a_broken_key_is_seen_in_the_result(backend: AttentionBackend) -> None:
    step = Step(SMOLLM, [(40, 1)], dtype=dtypes_of(backend)[0])
    step.pool[int(step.metadata.block_tables[0, 1]), step.layer, 0, 1, 3] = math.nan
    result = step.run(backend)
    assert torch.isnan(result[0, 3:6]).all()  # the query heads of KV head 1
    assert not torch.isnan(result[0, :3]).any()


def test_extreme_scores_overflow_nothing(backend: AttentionBackend) -> None:
    step = Step(SMOLLM, [(40, 1), (0, 20)], dtype=dtypes_of(backend)[0])
    step.scale = 50.0
    result, expected = step.run(backend), step.expected()
    tolerance = 1e-3 if result.dtype == torch.float32 else 2e-2
    np.testing.assert_allclose(result.float().numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_attention_runs_in_an_engine_thread_while_others_use_torch(num_threads: int) -> None:
    backend = get_backend("cpu", num_threads=num_threads)
    step = Step(SMOLLM, [(30 + i, 1) for i in range(12)] + [(0, 20)])
    results: list[torch.Tensor] = []
    done = threading.Event()

    def multiply() -> None:
        a = torch.randn(64, 64)
        while not done.is_set():
            a = torch.softmax(a @ a, dim=-1)

    def attend() -> None:
        results.extend(step.run(backend) for _ in range(50))

    other, engine = threading.Thread(target=multiply), threading.Thread(target=attend)
    other.start()
    engine.start()
    engine.join()
    done.set()
    other.join()
    assert len(results) == 50
    assert_close(results[0], step.expected())
    for result in results:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def test_two_engines_of_one_process_may_attend_at_once() -> None:
    steps = [Step(SMOLLM, [(30 + i, 1) for i in range(12)], seed=s) for s in range(2)]
    results: list[torch.Tensor | None] = [None, None]

    def attend(i: int) -> None:
        backend = get_backend("cpu", num_threads=2)
        for _ in range(50):
            results[i] = steps[i].run(backend)

    threads = [threading.Thread(target=attend, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step, result in zip(steps, results, strict=True):
        assert result is not None
        assert_close(result, step.expected())


def test_a_slot_or_block_outside_the_pool_is_refused() -> None:
    backend = get_backend("cpu")
    step = Step(SMOLLM, [(20, 1)])
    layer = step.pool[:, 1]
    backend.prepare(step.shape)
    for slot in (-1, len(step.pool) * 16):
        backend.plan(replace(step.metadata, slot_mapping=np.array([slot], np.int64)))
        with pytest.raises(AssertionError, match="in a pool of"):
            backend.write_kv(layer, step.new_k, step.new_v)
    for block_id in (-1, len(step.pool)):
        backend.plan(replace(step.metadata, block_tables=np.array([[1, block_id]], np.int32)))
        with pytest.raises(AssertionError, match="in a pool of"):
            backend.attend(step.q, layer, window=None)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=f"must be one of {', '.join(BACKENDS)}, not 'cuda9'"):
        get_backend("cuda9")

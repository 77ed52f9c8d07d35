"""What the shared suite does not ask of the Triton backend, by the interpreter: 8-bit pools, replays, refusals."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.attention_case import FP8, Case, Step
from benchmarks.gpu.tiny_model import write_tiny_model
from engine.attention.backend import AttentionBackend, AttentionShape, KVScales, build_metadata
from engine.attention.reference import ReferenceBackend
from engine.attention.triton_backend import TritonBackend
from engine.attention.triton_kernels import decode, write
from engine.config import EngineConfig
from engine.cuda.graphs import DecodeGraphs
from engine.engine import Engine
from engine.executor import ScheduledRequest
from engine.memory import PrivateMemory
from engine.offline import generate
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.torch_executor import TorchExecutor

GREEDY = SamplingParams(max_tokens=5, temperature=0.0)
RAGGED = ((0, 1), (14, 1), (15, 1), (31, 1), (300, 1), (0, 17), (30, 21))


def prepared(shape: AttentionShape) -> TritonBackend:
    backend = TritonBackend(device="cpu")
    backend.prepare(shape)
    return backend


def assert_as_reference(case: Case) -> None:
    """The same pool in every byte, the same results but for rounding of what the case computes in."""
    step, expected_step = Step(case, "cpu"), Step(case, "cpu")
    out = step.run(prepared(case.shape))
    reference = ReferenceBackend()
    reference.prepare(case.shape)
    reference.plan(expected_step.metadata)
    expected_step.write(reference)
    assert torch.equal(step.pool.view(torch.uint8), expected_step.pool.view(torch.uint8))
    expected = reference.attend(
        expected_step.q.float(), expected_step.pool[:, 1].float(), window=case.window, scales=case.scales
    )
    tolerance = 1e-5 if case.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group_size", range(1, 9))
def test_every_group_size_attends_as_the_reference(group_size: int, head_dim: int) -> None:
    turn = group_size + head_dim // 64  # so that both block sizes, windows and dtypes meet both head sizes
    num_kv_heads = 2 if group_size < 5 else 1
    case = Case(
        "",
        RAGGED,
        num_kv_heads * group_size,
        num_kv_heads,
        head_dim,
        block_size=(16, 32)[turn % 2],
        window=(None, 20)[turn // 2 % 2],
        dtype=(torch.float32, torch.bfloat16)[turn // 4 % 2],
    )
    assert_as_reference(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (128, 100)])
@pytest.mark.parametrize("scales", [KVScales(), KVScales(0.05, 0.021)], ids=str)
def test_an_8_bit_pool_is_written_and_attended_as_by_the_reference(
    dtype: torch.dtype, head_dim: int, window: int | None, scales: KVScales
) -> None:
    assert_as_reference(Case("", RAGGED, 4, 2, head_dim, window=window, dtype=dtype, kv_dtype=FP8, scales=scales))


def test_a_context_of_many_splits_is_put_together() -> None:
    assert_as_reference(Case("", ((5000, 1), (256, 1), (255, 1)), 2, 1, 16, dtype=torch.float32))


def test_every_8_bit_value_is_read_as_torch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    shape = AttentionShape(16, 16, 16, block_size=1, dtype=torch.float32, kv_dtype=FP8, scale=0.25)
    pool = torch.zeros((2, 2, 16, 1, 16), dtype=torch.uint8)
    pool[1, 1] = codes.view(16, 1, 16)
    backend = prepared(shape)
    # One key: its value is the result.
    backend.plan(build_metadata([ScheduledRequest("r", [0], 0, ([1],), None)], block_size=1))
    out = backend.attend(torch.ones(1, 16, 16), pool.view(FP8), window=None, scales=KVScales(1.0, 1.0))
    torch.testing.assert_close(out.flatten(), codes.view(FP8).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # NumPy's, of NaN, inf and what overflows
@pytest.mark.parametrize("scale", [1.0, 0.05, 3.7])
def test_every_number_is_written_as_the_reference_writes_it(scale: float) -> None:
    bf16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    # And those between two 8-bit values, and beside: ties, and what is only nearly one.
    values = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    ties = (values[:126] + values[1:127]) / 2 * scale
    near = torch.cat([ties, torch.nextafter(ties, torch.tensor(math.inf)), torch.nextafter(ties, torch.tensor(0.0))])
    numbers = torch.cat([bf16, near, -near])
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 4096)).view(-1, 16, 256)
    num_tokens = len(numbers)
    shape = AttentionShape(16, 16, 256, block_size=16, dtype=torch.float32, kv_dtype=FP8, scale=1.0)
    pools = []
    backends: list[AttentionBackend] = [prepared(shape), ReferenceBackend()]
    for backend in backends:
        pool = torch.zeros((3, 2, 16, 16, 256), dtype=FP8)
        backend.plan(build_metadata([ScheduledRequest("r", [0] * num_tokens, 0, ([2, 1],), None)], block_size=16))
        backend.write_kv(pool, numbers, -numbers, scales=KVScales(scale, scale))
        pools.append(pool.view(torch.uint8))
    differ = pools[0] != pools[1]
    # NaN has a sign, which says nothing.
    assert ((pools[0][differ] & 0x7F) == 0x7F).all()
    assert ((pools[1][differ] & 0x7F) == 0x7F).all()


def test_layers_with_and_without_a_window_share_a_plan() -> None:
    case = Case("", RAGGED, 4, 2, 64, dtype=torch.float32)
    step = Step(case, "cpu")
    both = prepared(replace(case.shape, windows=frozenset({None, 40})))
    step.run(both)
    for window in (None, 40):
        alone = prepared(replace(case.shape, windows=frozenset({window})))
        alone.plan(step.metadata)
        out = both.attend(step.q, step.pool[:, 1], window=window)
        assert torch.equal(out, alone.attend(step.q, step.pool[:, 1], window=window))


def test_a_step_without_tokens_is_nothing() -> None:
    case = Case("", RAGGED, 4, 2, 64)
    backend, pool = prepared(case.shape), Step(case, "cpu").pool[:, 1]
    backend.plan(build_metadata([], block_size=16))
    backend.write_kv(pool, torch.empty(0, 2, 64), torch.empty(0, 2, 64))
    assert backend.attend(torch.empty(0, 4, 64), pool, window=None).shape == (0, 4, 64)


def test_a_model_generates_the_tokens_that_it_does_with_the_reference(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", head_dim=64)
    tokens = []
    for name in ("reference", "triton"):
        executor = TorchExecutor(model, dtype="float32", attention_backend=name, max_model_len=64)
        engine = Engine(
            EngineConfig(num_blocks=16, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4),
            executor,
            PrivateMemory(16 * executor.layout.bytes_per_block),
        )
        requests = [
            Request(str(i), [1 + (7 * i + j) % 200 for j in range(5 + 13 * i)], GREEDY, arrival_time=0.0)
            for i in range(3)
        ]
        tokens.append(generate(engine, requests, lambda: 0.0))
    assert tokens[0] == tokens[1]


class Recorded:
    """A kernel that notes its launches, so that they can be made again: what a CUDA graph does."""

    def __init__(self, kernel: Any, launches: list[Callable[[], object]]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **constants: object) -> None:
            self._launches.append(lambda: self._kernel[grid](*arguments, **constants))
            self._launches[-1]()

        return launch


class Capture:
    """What a CUDA graph keeps of a call: the launches of kernels, with the addresses that they were given."""

    def __init__(self, launches: list[Callable[[], object]]) -> None:
        self._launches = launches

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self._launches.clear()
        step()
        captured = list(self._launches)

        def replay() -> None:
            for launch in captured:
                launch()

        return replay


@pytest.mark.parametrize("window", [None, 270])
def test_a_replay_of_the_same_launches_is_the_next_step(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Callable[[], object]] = []
    for module, name in ((write, "write_kv"), (decode, "decode"), (decode, "combine")):
        monkeypatch.setattr(module, name, Recorded(getattr(module, name), launches))
    max_batch, block_size, max_context_len = 5, 16, 600
    shape = AttentionShape(
        4, 2, 16, block_size, torch.float32, torch.float32, 0.25, frozenset({window}), max_context_len=max_context_len
    )
    backend, plain = prepared(shape), prepared(shape)
    blocks_each = -(-max_context_len // block_size)
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn((1 + max_batch * blocks_each, 2, 2, block_size, 16), generator=generator)
    pool[0] = math.nan  # the null block
    q, k, v = (torch.randn((max_batch, heads, 16), generator=generator) for heads in (4, 2, 2))

    attended: dict[int, torch.Tensor] = {}  # by batch size: where its graph puts what it computes

    def forward(token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        n = len(token_ids)
        backend.write_kv(pool, k[:n], v[:n])
        attended[n] = backend.attend(q[:n], pool, window=window)
        return attended[n].view(n, -1)

    graphs = DecodeGraphs(
        forward, backend, vocab_size=4 * 16, max_batch=max_batch, device=torch.device("cpu"), capture=Capture(launches)
    )
    assert graphs.sizes == [1, 2, 4, 5]
    tables = np.random.default_rng(0).permutation(max_batch * blocks_each).reshape(max_batch, blocks_each) + 1
    steps = [[600, 1, 257], [17], [256, 255, 512, 513, 600], [300, 2], [599, 1, 258], [1], [400]]
    for number, lengths in enumerate(steps):
        metadata = build_metadata(
            [
                ScheduledRequest(f"r{r}", [0], n - 1, (tables[(r + number) % max_batch].tolist(),), None)
                for r, n in enumerate(lengths)
            ],
            block_size=block_size,
        )
        for tensor in (q, k, v):
            tensor.normal_(generator=generator)
        expected_pool, n = pool.clone(), len(lengths)
        plain.plan(metadata)
        plain.write_kv(expected_pool, k[:n], v[:n])
        expected = plain.attend(q[:n], expected_pool, window=window)
        graphs.run(torch.zeros(n, dtype=torch.int64), torch.from_numpy(metadata.positions), metadata)
        assert torch.equal(attended[min(size for size in graphs.sizes if size >= n)][:n], expected)
        assert torch.equal(pool[1:], expected_pool[1:])


def test_a_replayed_context_beyond_the_longest_is_refused() -> None:
    case = Case("", ((40, 1),), 4, 2, 64)
    backend = prepared(replace(case.shape, max_context_len=40))
    with pytest.raises(AssertionError, match="a context of 41 tokens, at most 40"):
        backend.plan(Step(case, "cpu").metadata, replayed=True)


def test_a_slot_or_block_outside_the_pool_is_refused() -> None:
    step = Step(Case("", ((20, 1),), 4, 2, 64), "cpu")
    backend = prepared(step.case.shape)
    for slot in (-1, len(step.pool) * 16):
        backend.plan(replace(step.metadata, slot_mapping=np.array([slot], np.int64)))
        with pytest.raises(AssertionError, match="in a pool of"):
            step.write(backend)
    for block_id in (-1, len(step.pool)):
        backend.plan(replace(step.metadata, block_tables=np.array([[1, block_id]], np.int32)))
        with pytest.raises(AssertionError, match="in a pool of"):
            step.attend(backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float16, "kv_dtype": torch.float16}, "computes in float32 or bfloat16, not in torch.float16"),
        ({"kv_dtype": torch.bfloat16}, "in torch.float32 or torch.float8_e4m3fn, not in torch.bfloat16"),
        ({"head_dim": 512}, "a head_dim of 1 … 256, not 512"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(change: dict[str, Any], message: str) -> None:
    shape = Case("", RAGGED, 4, 2, 64, dtype=torch.float32).shape
    with pytest.raises(ValueError, match=message):
        prepared(replace(shape, **change))


def test_a_cpu_is_refused_unless_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="on cpu only under TRITON_INTERPRET=1"):
        TritonBackend(device="cpu")


@pytest.mark.parametrize("window", [31, 33, 50])
def test_windows_end_where_they_should_at_every_edge_of_a_tile(window: int) -> None:
    """Chunks whose first and last windows begin just before, on and just behind a tile's first key."""
    starts = (0, 1, 15, 16, *range(30, 34), *range(47, 51), *range(63, 67))
    lengths = tuple((before, new) for before in starts for new in (2, 17, 33))
    assert_as_reference(Case("", lengths, 1, 1, 16, window=window, dtype=torch.float32))

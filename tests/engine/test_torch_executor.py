"""The executor of the real model: what a step computes, and that nothing but the pool carries it over."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import torch_executor
from engine.attention.cpu import CpuBackend
from engine.executor import ModelOutput, SampledToken, SamplingInput, ScheduledRequest, SchedulerOutput
from engine.memory import PrivateMemory
from engine.model.errors import ModelLoadError
from engine.model.linear import TiledLinear
from engine.sampling_params import SamplingParams
from engine.torch_executor import TorchExecutor
from tests.tiny_models import logits_of, random_tokens, save_model

GREEDY = SamplingParams(max_tokens=100, temperature=0.0, logprobs=2)
NUM_BLOCKS = 16
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_model(path)
    return path


def bound(path: Path, **options: object) -> tuple[TorchExecutor, PrivateMemory]:
    executor = TorchExecutor(path, **{"dtype": "float32", "block_size": BLOCK_SIZE, "num_threads": 1, **options})
    memory = PrivateMemory(NUM_BLOCKS * executor.layout.bytes_per_block)
    executor.bind(memory, NUM_BLOCKS)
    return executor, memory


def share(
    name: str, tokens: Sequence[int], computed: int, table: Sequence[int], *, params: SamplingParams | None = GREEDY
) -> ScheduledRequest:
    """Computes `tokens` from position `computed` on; samples unless `params` is None."""
    sampling = None if params is None else SamplingInput(params, tokens[:1], tokens[1:])
    return ScheduledRequest(name, tokens[computed:], computed, (table,), sampling)


def execute(executor: TorchExecutor, *requests: ScheduledRequest) -> dict[str, SampledToken]:
    return executor.execute(SchedulerOutput(requests)).sampled


def generate(executor: TorchExecutor, prompt: list[int], table: list[int], count: int) -> list[int]:
    tokens, computed = list(prompt), 0
    for _ in range(count):
        tokens.append(execute(executor, share("a", tokens, computed, table))["a"].token_id)
        computed = len(tokens) - 1
    return tokens[len(prompt) :]


@pytest.mark.parametrize("attention_backend", ["reference", "cpu"])
def test_greedy_tokens_are_transformers_own(folder: Path, tmp_path: Path, attention_backend: str) -> None:
    model = save_model(tmp_path)
    executor, _ = bound(folder, attention_backend=attention_backend)
    tokens = random_tokens(9)
    ours = generate(executor, tokens, [5, 2, 9, 1, 7], 10)
    for token in ours:
        assert token == int(logits_of(model, tokens)[-1].argmax())
        tokens.append(token)


def test_logprobs_are_transformers_own(folder: Path, tmp_path: Path) -> None:
    logprobs = logits_of(save_model(tmp_path), random_tokens(9))[-1].log_softmax(-1)
    executor, _ = bound(folder)
    sampled = execute(executor, share("a", random_tokens(9), 0, [1, 2, 3]))["a"]
    assert sampled.logprob == pytest.approx(float(logprobs[sampled.token_id]), abs=1e-4)
    assert [token_id for token_id, _ in sampled.top] == logprobs.topk(2).indices.tolist()


def test_a_block_is_as_long_as_its_layout_says(folder: Path) -> None:
    # 3 layers, K and V, 2 heads of 8, float32.
    assert TorchExecutor(folder, block_size=4, dtype="float32").layout.bytes_per_block == 3 * 2 * 2 * 4 * 8 * 4
    assert TorchExecutor(folder, block_size=4, dtype="bfloat16").layout.bytes_per_block == 3 * 2 * 2 * 4 * 8 * 2


def test_blocks_copied_to_another_worker_go_on_there(folder: Path) -> None:
    here, memory_here = bound(folder)
    there, memory_there = bound(folder)
    prompt = random_tokens(9)
    expected = generate(here, prompt, [5, 2, 9, 1], 6)
    first, size = expected[0], here.layout.bytes_per_block
    for source, target in ((5, 8), (2, 3), (9, 4)):
        block = memory_here.buffer[source * size : (source + 1) * size]
        memory_there.buffer[target * size : (target + 1) * size] = block
    tokens = [*prompt, first]
    while len(tokens) < len(prompt) + 6:
        tokens.append(execute(there, share("a", tokens, len(tokens) - 1, [8, 3, 4, 6]))["a"].token_id)
    assert tokens[len(prompt) :] == expected


def test_a_result_is_the_same_to_the_bit_when_batch_mates_come_and_go(folder: Path) -> None:
    executor, _ = bound(folder)
    prompts = [random_tokens(7, seed=i) for i in range(4)]
    tables = [[1 + 3 * i, 2 + 3 * i] for i in range(4)]
    for prompt, table in zip(prompts, tables, strict=True):
        execute(executor, share("x", prompt[:-1], 0, table, params=None))
    decodes = [share(str(i), p, 6, t) for i, (p, t) in enumerate(zip(prompts, tables, strict=True))]
    alone = execute(executor, decodes[0])
    assert execute(executor, *decodes)["0"] == alone["0"]
    chunk = share("chunk", random_tokens(6, seed=9), 0, [14, 15])
    assert execute(executor, decodes[0], chunk)["0"] == alone["0"]


def test_only_requests_that_ask_get_a_token(folder: Path) -> None:
    executor, _ = bound(folder)
    tokens = random_tokens(6)
    assert execute(executor, share("a", tokens, 0, [1, 2], params=None)) == {}
    sampled = execute(executor, share("a", tokens, 0, [1, 2]), share("b", tokens, 0, [3, 4], params=None))
    assert sampled.keys() == {"a"}
    assert executor.execute(SchedulerOutput(())) == ModelOutput()


def test_a_token_outside_the_vocabulary_never_reaches_the_model(folder: Path) -> None:
    executor, _ = bound(folder)
    for token in (-1, executor.vocab_size):
        with pytest.raises(AssertionError, match="vocabulary"):
            execute(executor, share("a", [1, token], 0, [1]))


def test_bfloat16_blocks_give_nearly_the_same_logprobs(folder: Path) -> None:
    prompt = random_tokens(9)
    wide = execute(bound(folder)[0], share("a", prompt, 0, [1, 2, 3]))["a"]
    executor, memory = bound(folder, dtype="bfloat16")
    assert len(memory.buffer) == NUM_BLOCKS * executor.layout.bytes_per_block
    execute(executor, share("a", prompt[:-1], 0, [1, 2, 3], params=None))
    narrow = execute(executor, share("a", prompt, 8, [1, 2, 3]))["a"]
    assert narrow.logprob == pytest.approx(wide.logprob, abs=0.1)


def kv_of(memory: PrivateMemory, dtype: torch.dtype) -> torch.Tensor:
    """[num_blocks, num_layers, 2, …] of the tiny model, as float32."""
    layers = 3
    return torch.frombuffer(memory.buffer, dtype=dtype).float().view(NUM_BLOCKS, layers, 2, -1)


def calibrate(folder: Path, names: tuple[str, str]) -> list[tuple[float, float]]:
    """Gives a saved model scales for an 8-bit cache; a layer's (k, v)."""
    scales = [(0.25 * (layer + 1), 0.0625 * (layer + 1)) for layer in range(3)]
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer, both in enumerate(scales):
        for name, scale in zip(names, both, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
    save_file(tensors, path, metadata={"format": "pt"})
    return scales


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")])
def test_an_8_bit_cache_holds_what_was_computed_over_the_checkpoints_scales(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    save_model(tmp_path)
    scales = torch.tensor(calibrate(tmp_path, names))
    wide, wide_memory = bound(tmp_path, attention_backend="reference")
    narrow, memory = bound(tmp_path, attention_backend="reference", kv_cache_dtype="fp8_e4m3")
    assert narrow.layout.bytes_per_block * 4 == wide.layout.bytes_per_block
    prompt = random_tokens(9)
    expected = execute(wide, share("a", prompt, 0, [1, 2, 3]))["a"]
    token = execute(narrow, share("a", prompt, 0, [1, 2, 3]))["a"]
    assert token.logprob == pytest.approx(expected.logprob, abs=0.3)
    # The first layer's keys and values do not depend on any that were rounded before.
    stored, computed = kv_of(memory, torch.float8_e4m3fn)[1, 0], kv_of(wide_memory, torch.float32)[1, 0]
    torch.testing.assert_close(stored * scales[0][:, None], computed, rtol=2**-4, atol=2**-7)


def test_an_8_bit_cache_has_other_blocks_and_so_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    def print_of(path: Path, **options: object) -> bytes:
        return TorchExecutor(path, attention_backend="reference", **options).layout.fingerprint

    save_model(tmp_path)
    calibrate(tmp_path, ("k_scale", "v_scale"))
    prints = [print_of(path, kv_cache_dtype=kind) for path in (folder, tmp_path) for kind in ("auto", "fp8_e4m3")]
    assert len(set(prints)) == 4


def test_scales_are_in_the_fingerprint_whatever_is_seen_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large file samples are hashed, which may miss numbers that small."""
    monkeypatch.setattr(torch_executor, "weights_identity", lambda files: bytes(16))
    plain, scaled = tmp_path / "plain", tmp_path / "scaled"
    for folder in (plain, scaled):
        save_model(folder)
    calibrate(scaled, ("k_scale", "v_scale"))
    prints = [
        TorchExecutor(path, attention_backend="reference", kv_cache_dtype=kind).layout.fingerprint
        for path in (plain, scaled)
        for kind in ("auto", "fp8_e4m3")
    ]
    assert prints[0] == prints[2], "another cache needs no scales"
    assert prints[1] != prints[3]


class LateMemory:
    """Stands for a GPU's: the CPU's own, with marks."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8)
        self.streams: list[int] = []

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {}  # torch has no CUDA here

    def record_fence(self, stream: int) -> int:
        self.streams.append(stream)
        return len(self.streams)

    def close(self) -> None:
        """Nothing."""


def test_a_step_that_samples_nothing_is_marked_and_one_that_does_is_done(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_executor, "_as_bytes", lambda memory, device: memory.bytes)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    executor = TorchExecutor(folder, dtype="float32", block_size=BLOCK_SIZE, num_threads=1)
    memory = LateMemory(NUM_BLOCKS * executor.layout.bytes_per_block)
    executor.bind(memory, NUM_BLOCKS)
    prompt = random_tokens(9)
    chunk = executor.execute(SchedulerOutput((share("a", prompt[:8], 0, [1, 2, 3], params=None),)))
    assert (chunk.fence, chunk.sampled, memory.streams) == (1, {}, [77])
    last = executor.execute(SchedulerOutput((share("a", prompt, 8, [1, 2, 3]),)))
    assert (last.fence, list(last.sampled), memory.streams) == (None, ["a"], [77])


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_makes_no_sense_is_refused(tmp_path: Path, scale: float) -> None:
    save_model(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {"model.layers.1.self_attn.k_scale": torch.tensor([scale])}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.self_attn\.k_scale must be above 0"):
        TorchExecutor(tmp_path, attention_backend="reference", kv_cache_dtype="fp8_e4m3")
    TorchExecutor(tmp_path)  # not looked at where it does not matter


def test_fingerprints_are_equal_exactly_when_blocks_can_be_exchanged(folder: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(folder, copy)
    save_model(other, seed=1)

    def print_of(path: Path, **options: object) -> bytes:
        return TorchExecutor(path, **{"dtype": "float32", **options}).layout.fingerprint

    assert len(print_of(folder)) == 16
    assert print_of(folder) == print_of(copy) == print_of(folder, attention_backend="reference", dtype="float32")
    prints = [print_of(folder), print_of(other), print_of(folder, dtype="bfloat16"), print_of(folder, block_size=8)]
    assert len(set(prints)) == 4


@pytest.mark.parametrize("chunks_are_torchs", [True, False])
def test_threads_are_what_was_asked_for(folder: Path, chunks_are_torchs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps its threads only where something is left for them: they would take our kernels' cores."""
    monkeypatch.setattr(CpuBackend, "needs_torch_threads", chunks_are_torchs)
    before = torch.get_num_threads()
    try:
        lm_head = TorchExecutor(folder, num_threads=2).model.lm_head
        if isinstance(lm_head, TiledLinear):
            assert lm_head.num_threads == 2
            assert torch.get_num_threads() == (2 if chunks_are_torchs else 1)
        else:
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype must be one of auto, float32, bfloat16, not 'float16'"),
        ({"block_size": 0}, "block_size must be above 0, not 0"),
        ({"num_threads": 0}, "num_threads must be above 0, not 0"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be one of auto, fp8_e4m3, not 'fp8'"),
        (
            {"dtype": "float32", "kv_cache_dtype": "fp8_e4m3"},
            "attention backend cpu keeps the KV cache in .*float32, not in .*float8",
        ),
        ({"device": "cuda"}, "device cuda is not there: torch sees 0 GPUs"),
        ({"device": "tpu"}, "device must be cpu, cuda or cuda:<number>, not 'tpu'"),
        ({"attention_backend": "gpu"}, "attention backend must be one of .*, not 'gpu'"),
    ],
)
def test_arguments_out_of_range_are_named(folder: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchExecutor(folder, **options)


def test_a_model_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json does not exist"):
        TorchExecutor(tmp_path)

"""The executor of the real model: forks of a prompt, copies of blocks, and log-probabilities of prompts."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import Dtype, EngineConfig
from engine.cpu_tiles import has_tiles
from engine.engine import Engine
from engine.executor import SampledToken, SamplingInput, ScheduledRequest, SchedulerOutput
from engine.memory import PrivateMemory
from engine.model.linear import TiledLinear
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.torch_executor import TorchExecutor
from tests.engine.harness import Driver, check_idle
from tests.tiny_models import logits_of, random_tokens, save_model

NUM_BLOCKS = 64
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_model(path)
    return path


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads so wide that chunks of prompts are attended by machine code of our own, like most models'."""
    path = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=128,
            initializer_range=0.3,
            eos_token_id=5,
        )
    ).save_pretrained(path)
    return path


def bound(path: Path, dtype: Dtype = "float32", **options: object) -> tuple[TorchExecutor, PrivateMemory]:
    executor = TorchExecutor(path, dtype=dtype, block_size=BLOCK_SIZE, num_threads=1, **options)
    memory = PrivateMemory(NUM_BLOCKS * executor.layout.bytes_per_block)
    executor.bind(memory, NUM_BLOCKS)
    return executor, memory


def make_driver(path: Path, dtype: Dtype = "float32", **changes: int) -> Driver:
    limits = {"max_model_len": 127, "max_num_seqs": 8, "max_num_batched_tokens": 128, **changes}
    config = EngineConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **limits)
    executor = TorchExecutor(path, dtype=dtype, block_size=BLOCK_SIZE, num_threads=1)
    return Driver(Engine(config, executor, PrivateMemory(NUM_BLOCKS * executor.layout.bytes_per_block)))


def params(seed: int = 0, **changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 1.0, "logprobs": 3, "seed": seed, **changes})


def request(name: str, prompt: list[int], **changes: object) -> Request:
    return Request(name, prompt, params(**changes), arrival_time=0.0)


def tokens_of(driver: Driver, name: str) -> list[SampledToken]:
    return [output.token for output in driver.outputs[name]]


# --- forks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [8, 9, 15])
def test_forks_get_to_the_bit_what_the_same_requests_get_alone(folder: Path, dtype: Dtype, length: int) -> None:
    prompt = random_tokens(length)
    together = make_driver(folder, dtype)
    forks = [request(f"a.{seed}", prompt, seed=seed) for seed in range(4)]
    together.add_choices(request("a", prompt), forks)
    together.run()
    check_idle(together.engine)
    for seed, fork in enumerate(forks):
        alone = make_driver(folder, dtype)
        alone.add(request("alone", prompt, seed=seed))
        assert tokens_of(together, fork.request_id) == tokens_of(alone.run(), "alone")


def test_logits_of_a_prompt_are_made_once_for_all_its_forks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, _ = bound(folder)
    prompt = random_tokens(6)
    other = random_tokens(3, seed=1)
    forks = [(f"a.{seed}", SamplingInput(params(seed), prompt, [])) for seed in range(5)]
    shares = (
        ScheduledRequest("b", other, 0, ([1],), SamplingInput(params(9), other, [])),
        ScheduledRequest("chunk", other, 0, ([5],), None),
        ScheduledRequest("a", prompt, 0, ([2, 3],), None, forks=forks),
        ScheduledRequest("c", other, 0, ([4],), SamplingInput(params(8), other, [])),
    )
    rows: list[int] = []
    multiply = type(executor.model.lm_head).__call__
    monkeypatch.setattr(
        type(executor.model.lm_head),
        "__call__",
        lambda self, x: (
            rows.append(len(x)) or multiply(self, x) if self is executor.model.lm_head else multiply(self, x)
        ),
    )
    sampled = executor.execute(SchedulerOutput(shares)).sampled
    assert rows == [3]
    assert list(sampled) == ["b", *(name for name, _ in forks), "c"]
    for name, sampling in (("b", shares[0].sampling), *forks, ("c", shares[3].sampling)):
        assert sampling is not None
        alone = ScheduledRequest("x", sampling.prompt_token_ids, 0, ([6, 7],), sampling)
        assert executor.execute(SchedulerOutput((alone,))).sampled["x"] == sampled[name]


# --- copies


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str)
def test_blocks_are_copied_in_order_before_anything_is_written(folder: Path, options: dict[str, str]) -> None:
    executor, memory = bound(folder, attention_backend="reference", **options)
    prompt = random_tokens(3)
    execute = executor.execute
    execute(SchedulerOutput((ScheduledRequest("a", prompt, 0, ([5],), None),)))
    size = executor.layout.bytes_per_block

    def block(number: int) -> bytes:
        return bytes(memory.buffer[number * size : (number + 1) * size])

    before = block(5)
    assert any(before)
    # The last holder writes in place, in the same step.
    step = SchedulerOutput((ScheduledRequest("a", [7], 3, ([5],), None),), block_copies=((5, 9), (9, 2), (1, 9)))
    execute(step)
    assert block(2) == before
    assert block(9) == block(1) == bytes(size)
    assert block(5) != before


# --- log-probabilities of prompts


def test_log_probabilities_are_transformers_own(folder: Path, tmp_path: Path) -> None:
    prompt = random_tokens(100)
    expected = logits_of(save_model(tmp_path), prompt)[:-1].double().log_softmax(dim=1)
    driver = make_driver(folder)
    driver.add(request("a", prompt, prompt_logprobs=97))
    found = driver.run().outputs["a"][0].prompt_logprobs
    assert found is not None
    assert [token.token_id for token in found] == prompt[1:]
    for token, row in zip(found, expected, strict=True):
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
        by_id = dict(token.top)
        assert sorted(by_id) == list(range(97))
        assert [by_id[i] for i in range(97)] == pytest.approx(row.tolist(), abs=1e-4)
        assert token.logprob == by_id[token.token_id]


@pytest.mark.skipif(not has_tiles(torch.bfloat16), reason="this CPU multiplies bfloat16 otherwise")
def test_in_bfloat16_they_are_the_same_to_the_bit_in_any_chunks_and_from_a_warm_cache(wide_folder: Path) -> None:
    prompt = random_tokens(90)

    def found(driver: Driver, name: str) -> object:
        driver.add(request(name, prompt, prompt_logprobs=4))
        return driver.run().outputs[name][0].prompt_logprobs

    whole = make_driver(wide_folder, "bfloat16")
    expected = found(whole, "cold")
    assert found(whole, "warm") == expected
    for budget in (1, 5, 16, 65, 89):
        assert (
            found(make_driver(wide_folder, "bfloat16", max_num_batched_tokens=budget, max_num_seqs=1), "a") == expected
        )


def test_logits_of_a_long_chunk_are_never_all_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    driver = make_driver(folder)
    head = driver.engine.executor.model.lm_head
    assert isinstance(head, TiledLinear) or not has_tiles(torch.float32)
    multiply = type(head).__call__
    monkeypatch.setattr(
        type(head), "__call__", lambda self, x: (rows.append(len(x)) if self is head else None) or multiply(self, x)
    )
    driver.add(request("a", random_tokens(120), max_tokens=1, prompt_logprobs=0))
    driver.run()
    assert rows == [64, 55, 1]


class NoGraphs:
    """Graphs that would take any step of single tokens, and must not."""

    def takes(self, metadata: object) -> bool:
        return True

    def run(self, *arguments: object) -> torch.Tensor:
        raise AssertionError("replayed")


def test_a_step_that_asks_for_log_probabilities_of_a_prompt_is_no_graph(folder: Path) -> None:
    executor, _ = bound(folder)
    prompt = random_tokens(3)
    chunk = ScheduledRequest("a", prompt[:1], 0, ([1],), None, prompt_targets=prompt[1:2], num_prompt_top=1)
    expected = executor.execute(SchedulerOutput((chunk,))).prompt_logprobs
    executor._graphs = NoGraphs()
    assert executor.execute(SchedulerOutput((chunk,))).prompt_logprobs == expected
    plain = ScheduledRequest("a", prompt[:1], 0, ([1],), None)
    with pytest.raises(AssertionError, match="replayed"):
        executor.execute(SchedulerOutput((plain,)))


def test_forks_are_sampled_from_a_graphs_logits_after_the_copies(folder: Path) -> None:
    executor, _ = bound(folder)
    prompt = random_tokens(5)
    executor.execute(SchedulerOutput((ScheduledRequest("a", prompt[:4], 0, ([1],), None),)))
    forks = [(f"a.{seed}", SamplingInput(params(seed), prompt, [])) for seed in range(3)]
    last = ScheduledRequest("a", prompt[4:], 4, ([3, 2],), None, forks=forks)
    other = ScheduledRequest("b", [1], 0, ([4],), None)
    step = SchedulerOutput((other, last), block_copies=((1, 3),))
    expected = executor.execute(step).sampled

    def replay(token_ids: torch.Tensor, positions: torch.Tensor, metadata: object) -> torch.Tensor:
        executor._attention.plan(metadata)
        return executor._forward(token_ids, positions, torch.arange(len(token_ids)))

    executor._blocks[3].zero_()
    executor._graphs = SimpleNamespace(takes=lambda metadata: True, run=replay)
    sampled = executor.execute(step).sampled
    assert {name: token.token_id for name, token in sampled.items()} == {n: t.token_id for n, t in expected.items()}
    assert len(sampled) == 3

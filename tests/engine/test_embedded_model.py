"""One engine on the embedded model: its tokens are transformers', whatever the scheduler does to the requests."""

import numpy as np
import pytest
import torch

from engine.config import Dtype, EngineConfig
from engine.cpu_tiles import has_tiles
from engine.engine import Engine
from engine.executor import SampledToken
from engine.memory import PrivateMemory
from engine.model.locate import EMBEDDED_MODEL, resolve_model
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.torch_executor import TorchExecutor
from tests.engine.harness import Driver, check_idle
from tests.oracle import Oracle

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n", and the like.
CHAT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
SHARED = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2]


def prompts() -> dict[str, list[int]]:
    """Lengths around a block's end and a chunk's, a chat, and several that share their first block."""
    rng = np.random.default_rng(0)
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 63, 100)
    random = {f"{n} tokens": rng.integers(17, 49152, n).tolist() for n in lengths}
    turns = {f"turn {i}": SHARED + rng.integers(17, 49152, 1 + 3 * i).tolist() for i in range(5)}
    return {"chat": CHAT, **random, **turns}


def make_driver(num_blocks: int = 200, *, dtype: Dtype = "float32", **changes: int) -> Driver:
    limits = {"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 64, **changes}
    config = EngineConfig(num_blocks=num_blocks, **limits)
    executor = TorchExecutor(resolve_model(EMBEDDED_MODEL), dtype=dtype, num_threads=1)
    return Driver(Engine(config, executor, PrivateMemory(num_blocks * executor.layout.bytes_per_block)))


def run(driver: Driver, tag: str, **sampling: float) -> dict[str, list[int]]:
    """All prompts at once; their tokens."""
    params = {"temperature": 0.0, **sampling}
    for index, (name, prompt) in enumerate(prompts().items()):
        request_params = SamplingParams(max_tokens=NUM_TOKENS, seed=index, **params)
        driver.add(Request(f"{tag} {name}", prompt, request_params, arrival_time=float(index)))
    driver.run()
    check_idle(driver.engine)
    return {name: driver.tokens(f"{tag} {name}") for name in prompts()}


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> dict[str, list[int]]:
    return {name: oracle.reference_greedy(prompt, NUM_TOKENS) for name, prompt in prompts().items()}


def test_tokens_equal_transformers_at_once_and_from_a_warm_cache(expected: dict[str, list[int]]) -> None:
    driver = make_driver()
    assert run(driver, "cold") == expected
    assert run(driver, "warm") == expected
    assert driver.outputs["warm 100 tokens"][0].num_cached_tokens == 96
    assert not driver.preempted


@pytest.mark.skipif(not has_tiles(torch.bfloat16), reason="this CPU multiplies bfloat16 otherwise")
def test_bfloat16_is_the_same_to_the_bit_alone_in_any_chunks_and_from_a_warm_cache() -> None:
    """A prompt's rest of a single token, which a warm cache or a chunk's end leaves, included."""

    def logprobs(driver: Driver, tag: str) -> dict[str, list[tuple[tuple[int, float], ...]]]:
        run(driver, tag, logprobs=5)
        tokens = {name: [o.token for o in driver.outputs[f"{tag} {name}"]] for name in prompts()}
        return {name: [token.top for token in of_one if token is not None] for name, of_one in tokens.items()}

    driver = make_driver(dtype="bfloat16")
    cold = logprobs(driver, "cold")
    assert logprobs(driver, "warm") == cold
    chunked = make_driver(dtype="bfloat16", max_num_batched_tokens=16)
    assert logprobs(chunked, "chunked") == cold


@pytest.mark.skipif(not has_tiles(torch.bfloat16), reason="this CPU multiplies bfloat16 otherwise")
def test_bfloat16_log_probabilities_of_a_prompt_are_the_same_to_the_bit_in_any_chunks(oracle: Oracle) -> None:
    prompt = prompts()["100 tokens"]
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=3)

    def found(driver: Driver, *mates: Request) -> tuple[SampledToken, ...]:
        driver.add(Request("a", prompt, params, arrival_time=0.0), *mates)
        told = driver.run().outputs["a"][0].prompt_logprobs
        assert told is not None
        return told

    whole = make_driver(dtype="bfloat16", max_num_batched_tokens=128)
    expected = found(whole)
    assert found(whole) == expected  # with its blocks cached
    mate = Request("mate", prompts()["63 tokens"], params, arrival_time=0.0)
    for budget in (16, 33):
        assert found(make_driver(dtype="bfloat16", max_num_batched_tokens=budget), mate) == expected
    exact = oracle.logits(prompt)[:-1].log_softmax(-1)
    wide = found(make_driver())
    for token, row in zip(wide, exact, strict=True):
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_choices_of_one_prompt_are_the_requests_alone(dtype: Dtype) -> None:
    prompt = prompts()["turn 2"]

    def request(name: str, seed: int) -> Request:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=seed, logprobs=2)
        return Request(name, prompt, params, arrival_time=0.0)

    driver = make_driver(dtype=dtype)
    driver.add_choices(request("together", 0), [request(f"together {seed}", seed) for seed in range(4)])
    driver.run()
    alone = make_driver(dtype=dtype)
    for seed in range(4):
        alone.add(request(f"alone {seed}", seed))
        alone.run()
        together = [output.token for output in driver.outputs[f"together {seed}"]]
        if dtype == "bfloat16" and has_tiles(torch.bfloat16):
            assert together == [output.token for output in alone.outputs[f"alone {seed}"]]
        else:
            assert [token.token_id for token in together] == alone.tokens(f"alone {seed}")
    check_idle(driver.engine)


def test_tokens_equal_transformers_when_requests_are_preempted(expected: dict[str, list[int]]) -> None:
    driver = make_driver(num_blocks=20, expected_growth_tokens=0)
    assert run(driver, "tiny") == expected
    assert len(driver.preempted) > 3


def test_sampled_tokens_repeat_under_their_seeds_when_requests_are_preempted() -> None:
    roomy, tiny = make_driver(), make_driver(num_blocks=20, expected_growth_tokens=0)
    sampling = {"temperature": 0.8, "top_p": 0.9}
    tokens = run(roomy, "roomy", **sampling)
    assert run(tiny, "tiny", **sampling) == tokens
    assert len(tiny.preempted) > 3


def test_logits_equal_transformers_to_the_rounding_of_float32(oracle: Oracle) -> None:
    prompt = prompts()["100 tokens"]
    logprobs = oracle.logits(prompt)[-1].log_softmax(-1)
    driver = make_driver()
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
    driver.add(Request("a", prompt, params, arrival_time=0.0))
    (output,) = driver.run().outputs["a"]
    assert output.token is not None
    assert [i for i, _ in output.token.top] == logprobs.topk(5).indices.tolist()
    np.testing.assert_allclose([p for _, p in output.token.top], logprobs.topk(5).values, atol=1e-4)

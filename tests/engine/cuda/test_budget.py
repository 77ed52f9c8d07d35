"""How many blocks a GPU holds beside weights and activations."""

import pytest

from engine.cuda.budget import activation_bytes, num_blocks_that_fit
from engine.model.config import ModelConfig, RopeConfig

GIB = 1 << 30
BLOCK = 2 << 20  # 16 tokens of an 8B model in bfloat16


def fit(**changes: float) -> int:
    values = {"total": 80 * GIB, "free": 63 * GIB, "taken": 16 * GIB, "activations": 2 * GIB, "utilization": 0.9}
    values |= changes
    return num_blocks_that_fit(bytes_per_block=BLOCK, **values)  # type: ignore[arg-type]


def test_the_pool_takes_what_weights_and_activations_leave_of_the_share() -> None:
    assert fit() == (72 - 16 - 2) * GIB // BLOCK
    assert fit(utilization=0.45) == (36 - 16 - 2) * GIB // BLOCK


def test_what_others_on_the_gpu_have_taken_cannot_be_had() -> None:
    assert fit(free=20 * GIB) == (20 - 2) * GIB // BLOCK


@pytest.mark.parametrize("changes", [{"utilization": 0.2}, {"free": 1 * GIB}, {"taken": 100 * GIB}])
def test_where_nothing_fits_there_are_no_blocks(changes: dict[str, float]) -> None:
    assert fit(**changes) == 0


def test_activations_grow_with_tokens_and_logits_with_requests() -> None:
    llama_8b = ModelConfig(
        "LlamaForCausalLM", 128_256, 4096, 14_336, 32, 32, 8, 128, 131_072, 1e-5, RopeConfig(5e5), False, (None,) * 32
    )

    def needed(tokens: int, requests: int) -> int:
        return activation_bytes(llama_8b, max_num_batched_tokens=tokens, max_num_seqs=requests, item_bytes=2)

    assert needed(4096, 64) - needed(2048, 64) == needed(2048, 64) - needed(0, 64)
    assert needed(2048, 128) - needed(2048, 64) == 64 * 128_256 * 48
    # One layer of 2,048 tokens and the logits of 64 requests: between one and four GB, not a tenth and not ten times.
    assert 1 * GIB < needed(2048, 64) < 4 * GIB

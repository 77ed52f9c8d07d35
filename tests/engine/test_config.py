"""Dimensions that cannot work are refused before anything starts."""

import pytest

from engine import config
from engine.config import EngineConfig, resolved_dtype
from engine.engine import Engine
from engine.hash_executor import HashExecutor
from engine.memory import PrivateMemory


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 1}, "num_blocks must be at least 2, not 1"),
        ({"block_size": 0}, "block_size must be at least 1, not 0"),
        ({"max_model_len": 1}, "max_model_len must be at least 2, not 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        ({"expected_growth_tokens": -1}, "expected_growth_tokens must be at least 0, not -1"),
        ({"max_waiting": 0}, "max_waiting must be at least 1, not 0"),
        (
            {"max_num_batched_tokens": 8, "max_num_seqs": 9},
            r"max_num_batched_tokens \(8\) must be at least max_num_seqs \(9\)",
        ),
    ],
)
def test_value_is_named_when_it_is_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"num_blocks": 10, "max_model_len": 100, **options})


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(8, 112), (8, 100), (2, 16)])
def test_pool_is_accepted_when_it_holds_one_context(num_blocks, max_model_len):
    EngineConfig(num_blocks=num_blocks, max_model_len=max_model_len).check_pool_holds_context()


@pytest.mark.parametrize(("num_blocks", "max_model_len", "needed"), [(8, 113, 9), (2, 17, 3)])
def test_pool_is_refused_with_what_would_do_when_it_is_too_small_for_one_context(num_blocks, max_model_len, needed):
    config = EngineConfig(num_blocks=num_blocks, max_model_len=max_model_len)
    with pytest.raises(ValueError) as refused:
        config.check_pool_holds_context()
    message = str(refused.value)
    for part in (
        f"num_blocks={num_blocks}",
        "block_size=16",
        f"max_model_len={max_model_len}",
        f"num_blocks must be at least {needed}",
        f"max_model_len at most {(num_blocks - 1) * 16}",
    ):
        assert part in message


def test_engine_is_refused_when_its_executor_has_blocks_of_another_size():
    config = EngineConfig(num_blocks=4, max_model_len=16)
    with pytest.raises(ValueError, match="block_size is 16, but the executor's is 8"):
        Engine(config, HashExecutor(block_size=8), PrivateMemory(1 << 16))


def test_engine_is_refused_when_its_memory_is_too_small():
    config = EngineConfig(num_blocks=40, max_model_len=16)
    with pytest.raises(ValueError, match="40 blocks of 128 bytes need 5120 bytes, the memory has 4096"):
        Engine(config, HashExecutor(), PrivateMemory(4096))


@pytest.mark.parametrize(
    ("dtype", "device", "multiplies_bfloat16", "expected"),
    [
        ("auto", "cpu", True, "bfloat16"),
        ("auto", "cpu", False, "float32"),
        ("auto", "cuda:1", False, "bfloat16"),
        ("float32", "cpu", True, "float32"),
        ("bfloat16", "cpu", False, "bfloat16"),
    ],
)
def test_auto_is_bfloat16_but_on_a_cpu_that_cannot_multiply_it(
    dtype, device, multiplies_bfloat16, expected, monkeypatch
):
    monkeypatch.setattr(config, "multiplies_bfloat16", lambda: multiplies_bfloat16)
    assert resolved_dtype(dtype, device) == expected

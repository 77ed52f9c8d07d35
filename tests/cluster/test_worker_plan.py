"""What workers a configuration means, and what is refused before any of them starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig, ConfigError
from cluster.worker_info import Role
from cluster.worker_plan import DEFAULT_POOL_BYTES, plan_workers

BLOCK_BYTES = 2 * 2 * 2 * 16 * 8 * 4  # layers · K and V · heads · block_size · head_dim · float32


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that describes a tiny model: nobody reads its weights to plan."""
    return write_model(tmp_path)


def write_model(folder: Path, **changes: Any) -> str:
    description = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(description | changes))
    return str(folder)


def test_workers_differ_in_role_and_id_alone(model: str) -> None:
    plan = plan_workers(ClusterConfig(model=model, prefill_workers=1, decode_workers=2, served_model_name="tiny"))
    assert [(w.role, w.worker_id) for w in plan.workers] == [
        (Role.PREFILL, "prefill-0"),
        (Role.DECODE, "decode-0"),
        (Role.DECODE, "decode-1"),
    ]
    assert {w.config.model_name for w in plan.workers} == {"tiny"}
    assert len({w.config.engine for w in plan.workers}) == 1


def test_context_is_the_models_and_the_pool_about_a_gibibyte_unless_given(model: str) -> None:
    plan = plan_workers(ClusterConfig(model=model, dtype="float32"))
    assert plan.engine.max_model_len == 256
    assert plan.bytes_per_block == BLOCK_BYTES
    assert 0 <= plan.engine.num_blocks * BLOCK_BYTES - DEFAULT_POOL_BYTES <= BLOCK_BYTES
    assert {w.config.gpu_memory_utilization for w in plan.workers} == {None}
    half = plan_workers(ClusterConfig(model=model, dtype="bfloat16"))
    assert half.bytes_per_block == BLOCK_BYTES // 2


def test_default_pool_holds_two_contexts_of_a_long_one(tmp_path: Path) -> None:
    # 131,072 tokens of 16 KiB are 2 GiB a context.
    model = write_model(tmp_path, max_position_embeddings=131072, num_hidden_layers=128)
    plan = plan_workers(ClusterConfig(model=model, dtype="float32"))
    assert plan.engine.num_usable_blocks * plan.engine.block_size >= 2 * 131072


def test_pool_too_small_for_a_context_is_refused_with_the_numbers(model: str) -> None:
    assert plan_workers(ClusterConfig(model=model, num_blocks=17)).engine.num_blocks == 17
    with pytest.raises(ConfigError, match=r"num_blocks=16 .* max_model_len=256 .* at least 17, .* at most 240"):
        plan_workers(ClusterConfig(model=model, num_blocks=16))


def test_default_pool_is_refused_where_one_context_would_take_the_machine(tmp_path: Path) -> None:
    model = write_model(tmp_path, max_position_embeddings=1 << 20, num_hidden_layers=128)
    with pytest.raises(ConfigError, match=r"num_blocks must be at least 65537, or max_model_len at most 262144"):
        plan_workers(ClusterConfig(model=model, dtype="float32"))


def test_context_beyond_the_models_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len: must be at most the model's context \(256\), not 257"):
        plan_workers(ClusterConfig(model=model, max_model_len=257))


def test_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="model: model '/no/such/model' is neither"):
        plan_workers(ClusterConfig(model="/no/such/model"))


@pytest.mark.parametrize(("cores", "given", "threads"), [(8, None, 4), (2, None, 1), (1, None, 1), (8, 3, 3)])
def test_workers_share_the_cores_unless_told(model: str, cores: int, given: int | None, threads: int) -> None:
    plan = plan_workers(ClusterConfig(model=model, threads=given), num_cores=cores)
    assert [w.config.threads for w in plan.workers] == [threads, threads]
    assert plan.num_cpus == 2 * threads


def test_path_of_a_model_does_not_depend_on_the_working_directory(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(model).parent)
    plan = plan_workers(ClusterConfig(model=Path(model).name))
    assert {w.config.model for w in plan.workers} == {model}


@pytest.mark.parametrize(
    ("dtypes", "worker_dtype", "item_bytes"),
    [
        ({}, "bfloat16", 2),
        ({"dtype": "float32"}, "float32", 4),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}, "bfloat16", 1),
        ({"kv_cache_dtype": "fp8_e4m3"}, "bfloat16", 1),
    ],
)
def test_numbers_on_a_gpu_are_half_as_wide_unless_given(
    model: str, dtypes: dict[str, Any], worker_dtype: str, item_bytes: int
) -> None:
    plan = plan_workers(ClusterConfig(model=model, device="cuda", **dtypes))
    assert plan.bytes_per_block == BLOCK_BYTES * item_bytes // 4
    assert {w.config.dtype for w in plan.workers} == {worker_dtype}
    assert {w.config.kv_cache_dtype for w in plan.workers} == {dtypes.get("kv_cache_dtype", "auto")}
    assert {w.config.device for w in plan.workers} == {"cuda"}


@pytest.mark.parametrize(("share", "utilization"), [(1, 0.8), (0.5, 0.4)])
def test_worker_on_a_gpu_takes_its_share_of_the_memory_and_at_least_a_context(
    model: str, share: float, utilization: float
) -> None:
    config = ClusterConfig(model=model, device="cuda", gpus_per_worker=share, gpu_memory_utilization=0.8)
    plan = plan_workers(config)
    assert plan.engine.num_blocks == 1 + 256 // 16
    assert {w.config.gpu_memory_utilization for w in plan.workers} == {utilization}
    assert plan.num_gpus == 2 * share


def test_number_of_blocks_that_is_given_is_taken_on_a_gpu_as_well(model: str) -> None:
    plan = plan_workers(ClusterConfig(model=model, device="cuda", num_blocks=500))
    assert plan.engine.num_blocks == 500
    assert {w.config.gpu_memory_utilization for w in plan.workers} == {None}
    with pytest.raises(ConfigError, match=r"num_blocks=16 .* at least 17"):
        plan_workers(ClusterConfig(model=model, device="cuda", num_blocks=16))


def test_what_attention_runs_on_and_cuda_graphs_are_passed_on(model: str) -> None:
    config = ClusterConfig(model=model, device="cuda", attention_backend="triton", enforce_eager=True)
    assert {(w.config.attention_backend, w.config.enforce_eager) for w in plan_workers(config).workers} == {
        ("triton", True)
    }
    assert {w.config.device for w in plan_workers(ClusterConfig(model=model)).workers} == {"cpu"}


def test_batches_are_larger_on_a_gpu_unless_given(model: str) -> None:
    def sizes(**values: Any) -> tuple[int, int]:
        engine = plan_workers(ClusterConfig(model=model, **values)).engine
        return engine.max_num_seqs, engine.max_num_batched_tokens

    assert sizes() == (64, 512)
    assert sizes(device="cuda") == (256, 4096)
    assert sizes(max_num_seqs=1000) == (1000, 1000), "a full running batch must be able to take one step"
    assert sizes(device="cuda", max_num_seqs=8, max_num_batched_tokens=64) == (8, 64)


def test_workers_are_told_of_certificates_by_absolute_paths_and_of_the_log_and_of_no_key(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ClusterConfig.model_validate(
        {
            "model": model,
            "api_key": "sesame",
            "internal_ca_file": "ca.pem",
            "internal_cert_file": "certs/worker.crt",
            "internal_key_file": "/etc/tandem/worker.key",
            "internal_server_name": "blocks.example",
            "log_level": "info",
            "log_format": "json",
        }
    )
    for worker in plan_workers(config).workers:
        told = worker.config
        assert told.internal_files == (
            f"{tmp_path}/ca.pem", f"{tmp_path}/certs/worker.crt", "/etc/tandem/worker.key",
        )  # fmt: skip
        assert (told.internal_server_name, told.log_level, told.log_format) == ("blocks.example", "info", "json")
        assert "sesame" not in repr(worker)

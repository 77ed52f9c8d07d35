from pathlib import Path

import pytest

from engine.config import EngineConfig
from worker.build import build_engine
from worker.config import WorkerConfig

ENGINE = {"num_blocks": 64, "max_model_len": 512}


def test_a_yaml_file_is_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "worker.yaml"
    path.write_text("worker_id: d7\nthreads: 2\nengine: {num_blocks: 64, max_model_len: 512}\n")
    config = WorkerConfig.from_yaml(path)
    assert config == WorkerConfig(engine=EngineConfig(num_blocks=64, max_model_len=512), worker_id="d7", threads=2)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"threads": 0}, "threads must be at least 1, not 0"),
        ({"port": 70000}, r"port must be in \[0, 65535\], not 70000"),
        ({"dtype": "int4"}, "dtype: should be 'auto', 'float32' or 'bfloat16', not 'int4'"),
        ({"executor": "magic"}, "executor: should be 'torch' or 'hash', not 'magic'"),
        ({"lease_s": 0}, "lease_s must be above 0 seconds, not 0"),
        ({"worker_id": ""}, "worker_id must not be empty"),
        ({"max_repairs": -1}, "max_repairs must not be negative, not -1"),
        ({"internal_ca_file": "ca.pem"}, "internal_ca_file, internal_cert_file and internal_key_file: all three"),
        ({"internal_server_name": ""}, "internal_server_name must not be empty"),
        ({"log_level": "loud"}, "log_level: should be 'debug', 'info', 'warning' or 'error', not 'loud'"),
        ({"log_format": "xml"}, "log_format: should be 'text' or 'json', not 'xml'"),
        ({"threds": 1}, "unknown key threds"),
        ({"engine": {**ENGINE, "num_block": 1}}, "unknown key engine.num_block"),
        ({"engine": {**ENGINE, "block_size": 0}}, "block_size must be at least 1, not 0"),
        ({"engine": {}}, "engine.num_blocks is missing; engine.max_model_len is missing"),
        ({"engine": 5}, "engine must hold a mapping, not 5"),
        ({"engine": {**ENGINE, "num_blocks": "abc"}}, "engine.num_blocks: should be a valid integer.*, not 'abc'"),
        ({"threads": "two"}, "threads: should be a valid integer.*, not 'two'"),
        ({"model": 7}, "model: should be a valid string, not 7"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(values: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        WorkerConfig.from_dict({"engine": ENGINE, **values})


@pytest.mark.parametrize("text", ["- a list", "{", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "worker.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"worker\.yaml"):
        WorkerConfig.from_yaml(path)


def test_a_pool_too_small_for_one_context_does_not_start() -> None:
    config = WorkerConfig(engine=EngineConfig(num_blocks=10, max_model_len=512), executor="hash")
    with pytest.raises(ValueError, match="num_blocks must be at least 33, or max_model_len at most 144"):
        build_engine(config)


def test_a_configuration_without_an_engine_says_so() -> None:
    with pytest.raises(ValueError, match="engine is missing"):
        WorkerConfig.from_dict({"worker_id": "a"})


def test_a_model_that_is_not_there_is_named() -> None:
    config = WorkerConfig(engine=EngineConfig(num_blocks=64, max_model_len=512), model="no/such/model")
    with pytest.raises(FileNotFoundError, match="no/such/model"):
        build_engine(config)

"""What changes a fingerprint, and what does not."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.attention.backend import KVScales
from engine.model import fingerprint as module
from engine.model.config import ModelConfig, RopeConfig
from engine.model.fingerprint import fingerprint, weights_identity
from tests.tiny_models import save_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return ModelConfig.load(folder)


def test_a_fingerprint_is_sixteen_bytes_and_repeats(config: ModelConfig) -> None:
    prints = {fingerprint(config, dtype="float32", block_size=16, weights=b"w") for _ in range(2)}
    assert [len(p) for p in prints] == [16]


def test_everything_that_goes_into_a_block_changes_the_fingerprint(config: ModelConfig) -> None:
    prints = [
        fingerprint(config, dtype="float32", block_size=16, weights=b"w"),
        fingerprint(config, dtype="bfloat16", block_size=16, weights=b"w"),
        fingerprint(config, dtype="float32", block_size=32, weights=b"w"),
        fingerprint(config, dtype="float32", kv_dtype="float8_e4m3fn", block_size=16, weights=b"w"),
        fingerprint(
            config, dtype="float32", kv_dtype="float8_e4m3fn", kv_scales=[KVScales(0.5)], block_size=16, weights=b"w"
        ),
        fingerprint(config, dtype="float32", block_size=16, weights=b"x"),
        fingerprint(replace(config, rope=RopeConfig(5.0)), dtype="float32", block_size=16, weights=b"w"),
        fingerprint(replace(config, rms_norm_eps=0.5), dtype="float32", block_size=16, weights=b"w"),
    ]
    assert len(set(prints)) == len(prints)


def test_the_same_weights_are_the_same_wherever_they_lie(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"weights")
    assert weights_identity([tmp_path / "a"]) == weights_identity([tmp_path / "b"])


@pytest.mark.parametrize("position", [0, 499, 999])
def test_a_changed_byte_changes_the_identity(tmp_path: Path, position: int) -> None:
    file = tmp_path / "w"
    content = bytearray(1000)
    file.write_bytes(content)
    before = weights_identity([file])
    content[position] = 1
    file.write_bytes(content)
    assert weights_identity([file]) != before


def test_moving_bytes_between_files_changes_the_identity(tmp_path: Path) -> None:
    a, b, c, d = (tmp_path / name for name in "abcd")
    for file, content in ((a, b"ab"), (b, b"c"), (c, b"a"), (d, b"bc")):
        file.write_bytes(content)
    assert weights_identity([a, b]) != weights_identity([c, d])


def test_large_files_are_sampled_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WHOLE_BYTES", 2000)
    monkeypatch.setattr(module, "_HEAD_BYTES", 100)
    monkeypatch.setattr(module, "_SAMPLE_BYTES", 20)
    file = tmp_path / "w"
    size = 64 * 100
    identities = set()
    # The head, the first sample after it, the last byte, and everything a training run would change.
    for changed in (slice(0, 0), slice(0, 1), slice(100, 101), slice(size - 1, size), slice(0, size)):
        content = bytearray(size)
        content[changed] = b"\1" * len(content[changed])
        file.write_bytes(content)
        identities.add(weights_identity([file]))
    assert len(identities) == 5

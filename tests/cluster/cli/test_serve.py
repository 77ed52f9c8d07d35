"""`tandem serve`: its flags, and what is refused before anything is started."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.cli.app import app
from cluster.cli.serve import curl_line, pool_sizes
from cluster.config import ClusterConfig, ConfigError
from fake_generator import worker_status


def serve(*args: str) -> Result:
    return CliRunner().invoke(app, ["serve", *args])


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("a cluster was started")

    monkeypatch.setattr("cluster.cli.serve._serve", started)


def test_every_field_of_the_configuration_is_a_flag() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    for name in ClusterConfig.model_fields:
        assert f"--{name.replace('_', '-')} " in shown


def test_bad_flags_are_named_all_at_once() -> None:
    result = serve("--max-num-seqs", "0", "--dtype", "fp8")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "tandem: dtype: must be one of auto, float32 or bfloat16, not 'fp8'",
        "tandem: max_num_seqs: must be at least 1, not 0",
    ]


def test_bad_value_in_a_file_is_named_like_a_flag_and_a_flag_repairs_it(tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("port: 65536\nmodel: /no/such/model\n")
    result = serve("--config", str(file))
    assert (result.exit_code, result.stderr) == (2, "tandem: port: must be at most 65535, not 65536\n")
    result = serve("--config", str(file), "--port", "0")
    assert result.exit_code == 2
    assert result.stderr.startswith("tandem: model: model '/no/such/model' is neither a folder")


def test_pool_too_small_for_one_context_is_refused_with_the_numbers() -> None:
    result = serve("--num-blocks", "100")
    assert result.exit_code == 2
    assert "num_blocks=100 blocks" in result.stderr
    assert "num_blocks must be at least 513, or max_model_len at most 1584" in result.stderr


@pytest.mark.parametrize(("flags", "value"), [([], None), (["--enforce-eager"], True), (["--no-enforce-eager"], False)])
def test_truth_value_is_a_flag_without_one(monkeypatch: pytest.MonkeyPatch, flags: list[str], value: object) -> None:
    given: dict[str, object] = {}

    def load_config(_: object, flags: dict[str, object]) -> ClusterConfig:
        given.update(flags)
        raise ConfigError("enough")

    monkeypatch.setattr("cluster.cli.serve.load_config", load_config)
    assert serve(*flags).stderr == "tandem: enough\n"
    assert given["enforce_eager"] is value


def test_gpu_key_on_a_cpu_is_refused() -> None:
    result = serve("--enforce-eager")
    assert (result.exit_code, result.stderr) == (
        2,
        "tandem: enforce_eager: needs device cuda, and device is cpu; it is True\n",
    )


@pytest.mark.parametrize(
    ("num_blocks", "shown"),
    [
        ([1024, 1024], "1,024 of 16 tokens a worker (0.50 GiB)"),
        ([4096, 1024, 2048], "1,024 to 4,096 of 16 tokens a worker (0.50 to 2.00 GiB)"),
    ],
)
def test_pools_are_shown_as_large_as_they_are(num_blocks: list[int], shown: str) -> None:
    info = worker_status().info
    assert info is not None
    assert pool_sizes([replace(info, num_blocks=n, bytes_per_block=1 << 19) for n in num_blocks]) == shown


def test_first_request_is_a_line_for_a_shell() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", "it's a model"))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert words[2:4] == ["-H", "Content-Type: application/json"]
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's a model"


def test_keys_may_be_several_flags_and_a_bad_one_is_not_repeated() -> None:
    result = serve("--api-key", "sesame", "--api-key", "with space")
    assert (result.exit_code, result.stderr) == (
        2,
        "tandem: api_key: must be one key or a list of keys, each of visible ASCII without spaces\n",
    )
    # Both are taken: it is the model that is not there.
    result = serve("--api-key", "sesame", "--api-key", "other", "--model", "/no/such/model")
    assert result.stderr.startswith("tandem: model: ")


def test_first_request_for_a_shell_takes_what_the_server_wants() -> None:
    line = curl_line("https://a:1", "m", "--cacert ca.pem ")
    assert shlex.split(line)[:5] == [
        "curl",
        "https://a:1/v1/chat/completions",
        "-H",
        "Content-Type: application/json",
        "--cacert",
    ]

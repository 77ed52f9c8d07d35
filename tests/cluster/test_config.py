"""The configuration: files and flags, and what is said about values that are not allowed."""

from pathlib import Path

import pytest

from cluster.config import ClusterConfig, ConfigError, load_config


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "TANDEM_API_KEYS", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "tandem.yaml"


def problems_of(**values: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, values)
    return caught.value.problems


def test_defaults_are_allowed_values() -> None:
    config = load_config()
    assert config == ClusterConfig()
    assert (config.host, config.port, config.prefill_workers, config.decode_workers) == ("127.0.0.1", 8000, 1, 1)


@pytest.mark.parametrize(
    "origin", ["", "chat.example", "https://chat.example/", "https://Chat.example", "https://a.b https://c.d", "null"]
)
def test_what_no_browser_sends_is_no_origin(origin: str) -> None:
    (problem,) = problems_of(allowed_origins=["https://fine.example", origin])
    assert problem.startswith("allowed_origins: must be an origin as browsers send it, such as https://chat.example or")
    assert problem.endswith(f"not {origin!r}")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs: must be at least 1, not 0"),
        ({"max_num_seqs": "0"}, "max_num_seqs: must be at least 1, not 0"),
        ({"max_body_bytes": 0}, "max_body_bytes: must be at least 1, not 0"),
        ({"max_body_bytes": 2**31}, "max_body_bytes: must be at most 2147483647, not 2147483648"),
        ({"max_concurrent_requests": "none"}, "max_concurrent_requests: must be a whole number, not 'none'"),
        ({"log_format": "xml"}, "log_format: must be one of text or json, not 'xml'"),
        ({"otlp_endpoint": ""}, "otlp_endpoint: must be text that is not empty, not ''"),
        ({"allowed_origins": 7}, "allowed_origins: must be one text or a list of texts, not 7"),
        ({"allowed_origins": [7]}, "allowed_origins: must be text, not 7"),
        ({"tls_cert_file": "a.pem"}, "tls_key_file: needed beside tls_cert_file"),
        ({"port": 65536}, "port: must be at most 65535, not 65536"),
        ({"port": -1}, "port: must be at least 0, not -1"),
        ({"port": "http"}, "port: must be a whole number, not 'http'"),
        ({"port": 80.5}, "port: must be a whole number, not 80.5"),
        ({"port": True}, "port: must be a number, not True"),
        ({"port": [8000]}, "port: must be a whole number, not [8000]"),
        ({"dtype": "fp8"}, "dtype: must be one of auto, float32 or bfloat16, not 'fp8'"),
        ({"model": ""}, "model: must be text that is not empty, not ''"),
        ({"model": 7}, "model: must be text, not 7"),
        ({"num_blocks": 1}, "num_blocks: must be at least 2, not 1"),
        ({"decode_workers": 0}, "decode_workers: must be at least 1, not 0"),
        ({"lease_s": 0}, "lease_s: must be above 0, not 0"),
        ({"lease_s": "soon"}, "lease_s: must be a number, not 'soon'"),
        ({"lease_s": float("inf")}, "lease_s: must be finite, not inf"),
        ({"lease_s": float("nan")}, "lease_s: must be above 0, not nan"),
        ({"lease_s": 121}, "lease_s: must be at most handoff_timeout_s (120), not 121"),
        ({"handoff_timeout_s": 700}, "handoff_timeout_s: must be at most request_timeout_s (600), not 700"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 63},
            "max_num_batched_tokens: must be at least max_num_seqs (64), not 63",
        ),
        ({"port": 9000, "grpc_port": 9000}, "grpc_port: must differ from port, and both are 9000"),
        ({"max_num_seq": 8}, "max_num_seq: there is no such key; did you mean max_num_seqs?"),
        ({"zebra": 8}, "zebra: there is no such key"),
        ({"device": "gpu"}, "device: must be one of cpu or cuda, not 'gpu'"),
        ({"device": "cuda", "enforce_eager": 1}, "enforce_eager: must be true or false, not 1"),
        (
            {"device": "cuda", "dtype": "float32", "attention_backend": "flashinfer"},
            "attention_backend: flashinfer has no kernels for dtype float32; triton has",
        ),
        (
            {"device": "cuda", "num_blocks": 100, "gpu_memory_utilization": 0.5},
            "gpu_memory_utilization: num_blocks is given too, and says how large the pool is",
        ),
        (
            {"device": "cuda", "gpus_per_worker": "2"},
            "gpus_per_worker: must be 1 (a GPU each) or 0.5 (two workers share one), not '2'",
        ),
        ({"device": "cuda", "gpus_per_worker": True}, "gpus_per_worker: must be a number, not True"),
        ({"gpus_per_worker": 0.5}, "gpus_per_worker: needs device cuda, and device is cpu; it is 0.5"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype: needs device cuda, and device is cpu; it is fp8_e4m3"),
        ({"device": "cuda", "kv_cache_dtype": "fp8"}, "kv_cache_dtype: must be one of auto or fp8_e4m3, not 'fp8'"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization: needs device cuda, and device is cpu; it is 0.5"),
        ({"device": "cuda", "gpu_memory_utilization": 0}, "gpu_memory_utilization: must be above 0, not 0"),
        ({"device": "cuda", "gpu_memory_utilization": 1.1}, "gpu_memory_utilization: must be at most 1, not 1.1"),
        ({"enforce_eager": True}, "enforce_eager: needs device cuda, and device is cpu; it is True"),
        ({"device": "cuda", "enforce_eager": "perhaps"}, "enforce_eager: must be true or false, not 'perhaps'"),
        ({"device": "cuda", "enforce_eager": [1]}, "enforce_eager: must be true or false, not [1]"),
        (
            {"attention_backend": "flashinfer"},
            "attention_backend: must be one of auto, cpu, reference on device cpu, not 'flashinfer'",
        ),
        (
            {"device": "cuda", "attention_backend": "cpu"},
            "attention_backend: must be one of auto, reference, triton, flashinfer on device cuda, not 'cpu'",
        ),
        (
            {"ray_address": "ray://a:1"},
            "ray_address: must be 'local', 'auto' or host:port, not 'ray://a:1': the gateway runs inside the cluster",
        ),
    ],
)
def test_bad_value_is_named_with_what_is_allowed(values: dict[str, object], problem: str) -> None:
    assert problems_of(**values) == (problem,)


@pytest.mark.parametrize("share", [1, "1", 0.5, "0.5"])
def test_workers_have_a_gpu_each_or_share_one(share: object) -> None:
    assert load_config(None, {"device": "cuda", "gpus_per_worker": share}).gpus_per_worker == float(str(share))


def test_every_bad_value_is_named_at_once() -> None:
    assert problems_of(max_num_seqs=0, dtype="int4") == (
        "dtype: must be one of auto, float32 or bfloat16, not 'int4'",
        "max_num_seqs: must be at least 1, not 0",
    )


def test_flags_win_over_the_file(config_file: Path) -> None:
    config_file.write_text("port: 9000\nmax-num-seqs: 8\nmax_model_len: 512\n")
    config = load_config(config_file, {"port": "9100", "max_num_seqs": None})
    assert (config.port, config.max_num_seqs, config.max_model_len) == (9100, 8, 512)


def test_empty_file_means_the_defaults(config_file: Path) -> None:
    config_file.write_text("# nothing yet\n")
    assert load_config(config_file) == ClusterConfig()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("- port\n", "must hold keys and values, not a list"),
        ("port: [1\n", "is not YAML at line 2"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "gives max_num_seqs twice"),
        ("max-num-seq: 1\n", "did you mean max_num_seqs?"),
        ("8000: port\n", "8000: there is no such key"),
    ],
)
def test_file_that_cannot_be_meant_is_refused(config_file: Path, content: str, problem: str) -> None:
    config_file.write_text(content)
    with pytest.raises(ConfigError, match=problem.replace("?", r"\?")):
        load_config(config_file)


def test_missing_file_is_named(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"tandem\.yaml cannot be read: No such file"):
        load_config(config_file)


@pytest.mark.parametrize(
    ("values", "port"),
    [({"port": 8000}, 8001), ({"port": 0}, 0), ({"port": 65535}, 0), ({"port": 0, "grpc_port": 7000}, 7000)],
)
def test_grpc_port_follows_the_http_port_unless_given(values: dict[str, object], port: int) -> None:
    assert load_config(None, values).grpc_listen_port == port


def test_ray_address_of_the_environment_is_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert load_config().ray_address == "head:6379"
    assert load_config(None, {"ray_address": "local"}).joins_cluster is False

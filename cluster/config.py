"""All that a cluster is told: one frozen configuration, from a YAML file and flags (flags win).

A key is a flag: `max_num_seqs: 32` in the file is `--max-num-seqs 32` on the command line; names are vLLM's where it
has one. The fields below are the only list of them: the command line makes its flags out of it. Every value is checked
here, before anything is started, and a bad one is named together with what is allowed.

What depends on the model (a context, the size of a pool) is worked out in `worker_plan.py` and passed on, never
written back.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cluster.config_fields import FilePath, Float, GpuShare, Int, Keys, Origins, Port, Seconds
from cluster.config_words import sentence
from engine.config import Dtype, KVCacheDtype
from worker.config import DEFAULT_SERVER_NAME
from worker.log import LogFormat, LogLevel

DEFAULT_MAX_LOCAL_PREFILL_TOKENS = 16
DEFAULT_MAX_CONCURRENT = 1024
DEFAULT_MAX_BODY_BYTES = 8 * 1024 * 1024
# A GPU computes thousands of tokens in the time that a core takes for one.
_DEFAULT_NUM_SEQS = {"cpu": 64, "cuda": 256}
_DEFAULT_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 4096}

_ATTENTION_BACKENDS = {"cpu": ("auto", "cpu", "reference"), "cuda": ("auto", "reference", "triton", "flashinfer")}

_GATEWAY_TLS = ("tls_cert_file", "tls_key_file")
_INTERNAL_TLS = ("internal_ca_file", "internal_cert_file", "internal_key_file")


class ConfigError(ValueError):
    """Values that are not allowed: one sentence each, in `problems`."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class ClusterConfig(BaseModel):
    """One cluster: its model, its workers, its gateway. Complete at birth, but for what depends on the model.

    Raises:
        ValidationError: a value that is not allowed; `load_config` turns it into a `ConfigError`.
    """

    # An error's own text does not repeat what was given: it may be a key.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)

    model: str = Field(
        "smollm2-135m-instruct",
        min_length=1,
        description="The embedded model's name, a folder with config.json and safetensors, or a .gguf file.",
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="The name that clients use. (default: the model as given)"
    )
    dtype: Dtype = Field(
        "auto",
        description="Of computing and of the KV cache; auto: bfloat16, but float32 on a CPU that cannot multiply it.",
    )

    device: Literal["cpu", "cuda"] = Field("cpu", description="What workers compute on.")
    gpus_per_worker: GpuShare = Field(1.0, description="1, or 0.5: two workers share a GPU.")
    gpu_memory_utilization: Annotated[Float, Field(gt=0, le=1)] = Field(
        0.9, description="Of a GPU's memory, what its workers may take."
    )
    kv_cache_dtype: KVCacheDtype = Field(
        "auto", description="Of the KV cache alone; auto: dtype. fp8_e4m3 takes half of it, on a GPU."
    )
    attention_backend: Literal["auto", "cpu", "reference", "triton", "flashinfer"] = Field(
        "auto", description="auto: cpu on a CPU; on a GPU flashinfer where it can run, else triton."
    )
    enforce_eager: Annotated[bool, Field(strict=True)] = Field(False, description="No CUDA graphs.")

    host: str = Field("127.0.0.1", min_length=1, description="Where the gateway listens.")
    port: Port = Field(8000, description="HTTP; 0: one that is free.")
    grpc_port: Port | None = Field(None, description="gRPC. (default: port + 1, or one that is free if port is 0)")

    api_key: Keys = Field(
        (),
        description="A key that clients must present; give it several times for several. Whoever can list this "
        "machine's processes sees a flag's: prefer a file, or TANDEM_API_KEYS. (default: $TANDEM_API_KEYS, "
        "comma-separated; without any key everybody may come in)",
    )
    api_keys_file: FilePath | None = Field(None, description="More of them, one a line; # begins a comment.")
    allowed_origins: Origins = Field(
        (),
        description="A web site, as https://chat.example, whose pages may read answers (CORS); give it several times "
        'for several, or "*": all. (default: none)',
    )
    tls_cert_file: FilePath | None = Field(
        None, description="The gateway's certificate chain, PEM, for HTTP and gRPC. (default: no TLS)"
    )
    tls_key_file: FilePath | None = Field(None, description="Its private key, PEM.")
    internal_ca_file: FilePath | None = Field(
        None,
        description="PEM; gateway and workers show each other certificates of this authority. (default: no TLS inside)",
    )
    internal_cert_file: FilePath | None = Field(
        None, description="The certificate that each of them shows, PEM; at this path on every machine."
    )
    internal_key_file: FilePath | None = Field(None, description="Its private key, PEM.")
    internal_server_name: str = Field(
        DEFAULT_SERVER_NAME,
        min_length=1,
        description="The name that internal certificates must be for (subjectAltName), whatever a worker's address.",
    )

    prefill_workers: Int = Field(1, ge=0, description="0: decode workers prefill for themselves.")
    decode_workers: Int = Field(1, ge=1, description="At least one.")
    threads: Int | None = Field(
        None, ge=1, description="For computing, a worker. (default: this machine's cores, shared by the workers)"
    )
    block_size: Int = Field(16, ge=1, le=1024, description="Tokens a KV block.")
    num_blocks: Int | None = Field(
        None,
        ge=2,
        description="KV blocks a worker, with the null block. "
        "(default: about 1 GiB, or two contexts; on a GPU all that gpu_memory_utilization leaves)",
    )
    max_model_len: Int | None = Field(
        None, ge=2, description="Longest context, prompt and output. (default: the model's own)"
    )
    max_num_seqs: Int | None = Field(
        None, ge=1, description="Requests in a worker's running batch. (default: 64; on a GPU 256)"
    )
    max_num_batched_tokens: Int | None = Field(
        None,
        ge=1,
        description="Tokens a step of a worker. A step lasts as long as these take, and running requests wait for it. "
        "(default: 512, on a GPU 4096; never below max_num_seqs)",
    )
    max_local_prefill_tokens: Int = Field(
        DEFAULT_MAX_LOCAL_PREFILL_TOKENS,
        ge=0,
        description="Uncached prompts up to this length are prefilled on the decode worker; 0: always apart.",
    )

    max_waiting: Int = Field(1024, ge=1, description="Requests waiting at a worker, before more are refused (429).")
    max_concurrent_requests: Int = Field(
        DEFAULT_MAX_CONCURRENT, ge=1, description="Sequences in flight at the gateway, before more are refused (429)."
    )
    max_body_bytes: Int = Field(
        DEFAULT_MAX_BODY_BYTES,
        ge=1,
        le=2**31 - 1,
        description="Of an HTTP request's body (else 413), or of a gRPC message.",
    )
    request_timeout_s: Seconds = Field(600.0, description="Deadline of a request that brings none.")
    handoff_timeout_s: Seconds = Field(120.0, description="Deadline of a hand-off whose request has none.")
    lease_s: Seconds = Field(30.0, description="A hand-off without progress for so long is over.")
    keepalive_s: Seconds = Field(2.0, description="Between pings of a stream; dead after 3 missed.")
    max_repairs: Int = Field(3, ge=0, description="How often a request may lose a worker before it fails.")
    drain_timeout_s: Seconds = Field(
        300.0, description="A worker asked to drain (Worker.Drain) answers after so long at the latest, whatever runs."
    )
    start_timeout_s: Seconds = Field(600.0, description="For workers to be placed and to load the model.")
    shutdown_timeout_s: Seconds = Field(5.0, description="For running requests to end after Ctrl-C.")

    ray_address: str = Field(
        "local",
        min_length=1,
        description='"local": a Ray of its own on this machine; "auto" or host:port: join that cluster, '
        "from one of its nodes. (default: $RAY_ADDRESS, or local)",
    )
    log_level: LogLevel = Field("warning", description="Of all processes; info has a line for each request.")
    log_format: LogFormat = Field("text", description="json: an object a line.")
    otlp_endpoint: str | None = Field(
        None,
        min_length=1,
        description="Where traces go, OTLP over gRPC: http://host:4317; needs the extra otel. "
        "(default: $OTEL_EXPORTER_OTLP_ENDPOINT, or none)",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "ClusterConfig":
        if self.num_batched_tokens < self.num_seqs:
            # Else a full running batch could not take one step.
            raise _problem(
                f"max_num_batched_tokens: must be at least max_num_seqs ({self.num_seqs}), "
                f"not {self.num_batched_tokens}"
            )
        if self.port and self.port == self.grpc_port:
            raise _problem(f"grpc_port: must differ from port, and both are {self.port}")
        # Nested outward: an inner wait must be over before an outer one gives up.
        for inner, outer in (("lease_s", "handoff_timeout_s"), ("handoff_timeout_s", "request_timeout_s")):
            if getattr(self, inner) > getattr(self, outer):
                raise _problem(
                    f"{inner}: must be at most {outer} ({getattr(self, outer):g}), not {getattr(self, inner):g}"
                )
        if self.device == "cuda":
            if self.dtype == "float32" and self.attention_backend == "flashinfer":
                raise _problem("attention_backend: flashinfer has no kernels for dtype float32; triton has")
            if self.num_blocks and self.gpu_memory_utilization != _default_of(self, "gpu_memory_utilization"):
                raise _problem("gpu_memory_utilization: num_blocks is given too, and says how large the pool is")
        if self.device == "cpu":
            # What would be ignored was meant for another device.
            for name in ("gpus_per_worker", "gpu_memory_utilization", "kv_cache_dtype", "enforce_eager"):
                if (value := getattr(self, name)) != _default_of(self, name):
                    raise _problem(f"{name}: needs device cuda, and device is cpu; it is {value}")
        if self.attention_backend not in _ATTENTION_BACKENDS[self.device]:
            raise _problem(
                f"attention_backend: must be one of {', '.join(_ATTENTION_BACKENDS[self.device])} "
                f"on device {self.device}, not {self.attention_backend!r}"
            )
        for names in (_GATEWAY_TLS, _INTERNAL_TLS):
            given = [name for name in names if getattr(self, name) is not None]
            if given and len(given) < len(names):
                missing = ", ".join(name for name in names if name not in given)
                raise _problem(f"{missing}: needed beside {', '.join(given)}")
        if self.internal_ca_file is None and self.internal_server_name != _default_of(self, "internal_server_name"):
            raise _problem(f"internal_server_name: needs {', '.join(_INTERNAL_TLS)}")
        if self.ray_address.startswith("ray://"):
            raise _problem(
                f"ray_address: must be 'local', 'auto' or host:port, not {self.ray_address!r}: "
                "the gateway runs inside the cluster"
            )
        return self

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or self.model

    @property
    def num_seqs(self) -> int:
        """Requests in a worker's running batch, at most."""
        return self.max_num_seqs or _DEFAULT_NUM_SEQS[self.device]

    @property
    def num_batched_tokens(self) -> int:
        """Tokens a step of a worker, at most."""
        return self.max_num_batched_tokens or max(_DEFAULT_NUM_BATCHED_TOKENS[self.device], self.num_seqs)

    @property
    def grpc_listen_port(self) -> int:
        """The port that the gRPC server asks for; 0: one that is free."""
        if self.grpc_port is not None:
            return self.grpc_port
        # The neighbour, so that it can be guessed; a port 65535 has none.
        return self.port + 1 if 0 < self.port < 65535 else 0

    @property
    def joins_cluster(self) -> bool:
        """Whether workers may run on other machines."""
        return self.ray_address != "local"


def load_config(file: Path | None = None, flags: Mapping[str, object] | None = None) -> ClusterConfig:
    """The configuration of a file, if one is given, and of flags over it.

    Args:
        file: YAML; keys as flags are written, with `_` or `-`.
        flags: by field name; None is a flag that was not given.

    Raises:
        ConfigError: a file that is not readable, an unknown key, values that are not allowed.
    """
    values = {} if file is None else _read_yaml(file)
    values |= {name: value for name, value in (flags or {}).items() if value is not None}
    for name, value in _environment().items():
        values.setdefault(name, value)
    try:
        return ClusterConfig.model_validate(values)
    except ValidationError as exc:
        raise ConfigError(*(sentence(error, ClusterConfig.model_fields) for error in exc.errors())) from exc


def _environment() -> dict[str, object]:
    """What the environment says; a variable that is set to nothing says nothing, but where that would open the doors.

    Raises:
        ConfigError: keys are set to nothing.
    """
    values: dict[str, object] = {}
    for variable, name in (("RAY_ADDRESS", "ray_address"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "otlp_endpoint")):
        if value := os.environ.get(variable):
            values[name] = value
    given = os.environ.get("TANDEM_API_KEYS")
    if given is not None:
        keys = [key.strip() for key in given.split(",") if key.strip()]
        if not keys:
            raise ConfigError(
                "TANDEM_API_KEYS is set but holds no key, as when a secret is missing; "
                "unset it if everybody may come in without one"
            )
        values["api_key"] = keys
    return values


def _read_yaml(file: Path) -> dict[str, object]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"config file {file} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"config file {file} is not UTF-8 text") from exc
    except yaml.YAMLError as exc:
        where = f" at line {mark.line + 1}" if (mark := getattr(exc, "problem_mark", None)) else ""
        raise ConfigError(f"config file {file} is not YAML{where}: {getattr(exc, 'problem', exc)}") from exc
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"config file {file} must hold keys and values, not a {type(content).__name__}")
    values: dict[str, object] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in values:
            raise ConfigError(f"config file {file} gives {name} twice, once with - and once with _")
        values[name] = value
    return values


def _default_of(config: ClusterConfig, name: str) -> object:
    return type(config).model_fields[name].default


def _problem(sentence: str) -> PydanticCustomError:
    # Braces would be read as a template.
    return PydanticCustomError("cluster", "{sentence}", {"sentence": sentence})

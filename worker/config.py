"""All that a worker is told at its start: frozen, complete, validated."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from engine.config import Dtype, EngineConfig, KVCacheDtype, check_device
from worker.log import LogFormat, LogLevel

ExecutorKind = Literal["torch", "hash"]
# What an internal certificate is for, unless a configuration says otherwise.
DEFAULT_SERVER_NAME = "tandem-worker"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker. Times are in seconds; port 0 is one that the system picks.

    Raises:
        ValueError: a value outside what is allowed; the message names it.
    """

    engine: EngineConfig
    worker_id: str = "worker-0"  # stays over restarts; each start has an instance id of its own
    model: str = "smollm2-135m-instruct"  # "smollm2-135m-instruct" (embedded), a folder, or a .gguf file
    served_model_name: str = ""  # empty: `model`
    executor: ExecutorKind = "torch"  # "hash": no model, tokens are hashes of the cache (tests)
    dtype: Dtype = "auto"
    device: str = "cpu"  # or "cuda", or "cuda:1": the number counts the GPUs that this process sees
    attention_backend: str = "auto"  # "cpu" on a CPU; on a GPU "flashinfer" where it can run, else "triton"
    kv_cache_dtype: KVCacheDtype = "auto"  # "auto": dtype; "fp8_e4m3": half of it, on a GPU only
    gpu_memory_utilization: float | None = None  # the pool takes what is left of so much of the GPU's memory, but never
    # fewer blocks than `engine.num_blocks`; None: those
    enforce_eager: bool = False  # no CUDA graphs
    threads: int | None = None  # for computing; None: torch's own choice
    host: str = "127.0.0.1"  # to listen on, and to be reached at
    port: int = 0
    metrics_port: int = 0
    lease_s: float = 30.0  # a hand-off without progress for so long is over
    handoff_timeout_s: float = 120.0  # for requests without a deadline of their own
    request_timeout_s: float = 600.0
    max_repairs: int = 3  # hand-offs that may be lost before the request fails
    drain_timeout_s: float = 300.0
    # Mutual TLS with gateways and other workers: PEM files, all three or none.
    internal_ca_file: str | None = None
    internal_cert_file: str | None = None
    internal_key_file: str | None = None
    internal_server_name: str = DEFAULT_SERVER_NAME  # that certificates must be for
    log_level: LogLevel = "warning"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        if not self.worker_id:
            raise ValueError("worker_id must not be empty")
        if self.executor not in get_args(ExecutorKind):
            raise ValueError(f"executor must be one of {', '.join(get_args(ExecutorKind))}, not {self.executor!r}")
        if self.dtype not in get_args(Dtype):
            raise ValueError(f"dtype must be one of {', '.join(get_args(Dtype))}, not {self.dtype!r}")
        check_device(self.device)
        if self.kv_cache_dtype not in get_args(KVCacheDtype):
            raise ValueError(
                f"kv_cache_dtype must be one of {', '.join(get_args(KVCacheDtype))}, not {self.kv_cache_dtype!r}"
            )
        if self.kv_cache_dtype != "auto" and self.device == "cpu":
            raise ValueError(f"kv_cache_dtype {self.kv_cache_dtype} needs device cuda: on a cpu it must be auto")
        if self.gpu_memory_utilization is not None:
            if self.device == "cpu":
                raise ValueError("gpu_memory_utilization needs device cuda: on a cpu the pool is engine.num_blocks")
            if not 0 < self.gpu_memory_utilization <= 1:
                raise ValueError(f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        for name in ("port", "metrics_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name} must be in [0, 65535], not {getattr(self, name)}")
        for name in ("lease_s", "handoff_timeout_s", "request_timeout_s", "drain_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0 seconds, not {getattr(self, name)}")
        if self.max_repairs < 0:
            raise ValueError(f"max_repairs must not be negative, not {self.max_repairs}")
        if len({file is None for file in self.internal_files}) > 1:
            raise ValueError(
                "internal_ca_file, internal_cert_file and internal_key_file: all three are needed, or none"
            )
        if not self.internal_server_name:
            raise ValueError("internal_server_name must not be empty")
        for name, kind in (("log_level", LogLevel), ("log_format", LogFormat)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, not {getattr(self, name)!r}")

    @property
    def model_name(self) -> str:
        """The name that clients and metrics use."""
        return self.served_model_name or self.model

    @property
    def internal_files(self) -> tuple[str | None, str | None, str | None]:
        """Authority, certificate and key of mutual TLS."""
        return self.internal_ca_file, self.internal_cert_file, self.internal_key_file

    @classmethod
    def from_dict(cls, values: object) -> "WorkerConfig":
        """Made from plain values, as a YAML file has them; `engine` is a mapping of its own.

        Raises:
            ValueError: one sentence for each value that is missing, unknown, of the wrong type or not allowed.
        """
        _check_keys(cls, values, "the configuration", "")
        assert isinstance(values, dict)
        _check_keys(EngineConfig, values.get("engine", {}), "engine", "engine.")
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as exc:
            raise ValueError("; ".join(_sentence(error) for error in exc.errors())) from exc

    @classmethod
    def from_yaml(cls, path: Path) -> "WorkerConfig":
        """Read from a file.

        Raises:
            ValueError: not YAML, or not a configuration; the message names the file.
            OSError: it cannot be read.
        """
        try:
            return cls.from_dict(yaml.safe_load(path.read_text()))
        except yaml.YAMLError as exc:
            raise ValueError(f"{path} is not YAML: {exc}") from exc
        except ValueError as exc:
            raise ValueError(f"{path}: {exc}") from exc


def _check_keys(kind: type[WorkerConfig] | type[EngineConfig], values: object, name: str, prefix: str) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{name} must hold a mapping, not {values!r}")
    known = {f.name for f in fields(kind)}
    if unknown := sorted(map(str, values.keys() - known)):
        raise ValueError(f"unknown key {prefix}{unknown[0]}; known are {', '.join(sorted(known))}")


def _sentence(error: ErrorDetails) -> str:
    where = ".".join(map(str, error["loc"]))
    match error["type"]:
        case "missing":
            return f"{where} is missing"
        case "value_error":
            return str(error["ctx"]["error"])  # our own words
    return f"{where}: {error['msg'].removeprefix('Input ')}, not {error['input']!r}"

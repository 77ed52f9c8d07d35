"""Which workers a configuration means, and what each is told.

Worked out before anything is started, and without torch: the model's description is read, not its weights. So a pool
that is too small, or a model that is not there, is refused within a second.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from cluster.config import ClusterConfig, ConfigError
from cluster.worker_info import Role
from engine.config import EngineConfig, resolved_dtype
from engine.kvcache.slots import num_blocks_for
from engine.model.config import ModelConfig
from engine.model.errors import ModelLoadError
from engine.model.locate import EMBEDDED_MODEL, resolve_model
from worker.config import WorkerConfig

DEFAULT_POOL_BYTES = 1 << 30
# A default never takes more than this to hold a second context: models of long contexts would take the whole machine.
_MAX_DEFAULT_POOL_BYTES = 4 << 30
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "fp8_e4m3": 1}


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One worker to be: its role and all that it is told."""

    role: Role
    config: WorkerConfig
    num_gpus: float = 0.0  # 0.5: it shares one

    @property
    def worker_id(self) -> str:
        return self.config.worker_id

    @property
    def num_cpus(self) -> int:
        """Cores that it computes on."""
        return self.config.threads or 1


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """All workers of a cluster, prefill workers first. They differ in nothing but role and id."""

    workers: tuple[PlannedWorker, ...]
    bytes_per_block: int

    @property
    def engine(self) -> EngineConfig:
        """Its `num_blocks` is the least that a worker has: on a GPU it takes as many more as fit."""
        return self.workers[0].config.engine

    @property
    def num_cpus(self) -> int:
        """Of all workers."""
        return sum(worker.num_cpus for worker in self.workers)

    @property
    def num_gpus(self) -> float:
        """Of all workers."""
        return sum(worker.num_gpus for worker in self.workers)


def plan_workers(config: ClusterConfig, num_cores: int | None = None) -> WorkerPlan:
    """The workers of a cluster.

    Args:
        num_cores: that workers share if no number of threads is given; None: this machine's.

    Raises:
        ConfigError: no such model, one that is not supported, or a pool or a context that does not fit it.
    """
    try:
        path = resolve_model(config.model)
        model = ModelConfig.load(path)
    except (FileNotFoundError, ModelLoadError) as exc:
        raise ConfigError(f"model: {exc}") from exc
    dtype = resolved_dtype(config.dtype, config.device)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    bytes_per_block = model.bytes_per_block(config.block_size, _ITEM_BYTES[kv_dtype])
    engine = _engine_config(config, model, bytes_per_block)
    num_workers = config.prefill_workers + config.decode_workers
    threads = config.threads or max(1, (num_cores or len(os.sched_getaffinity(0))) // num_workers)
    # A path must not depend on the directory that a worker finds itself in; the embedded model each finds for itself.
    model_for_workers = config.model if config.model == EMBEDDED_MODEL else str(path)
    num_gpus = config.gpus_per_worker if config.device == "cuda" else 0.0
    workers = [
        PlannedWorker(role, _worker_config(config, model_for_workers, f"{role.value}-{i}", engine, threads), num_gpus)
        for role, count in ((Role.PREFILL, config.prefill_workers), (Role.DECODE, config.decode_workers))
        for i in range(count)
    ]
    return WorkerPlan(tuple(workers), bytes_per_block)


def _engine_config(config: ClusterConfig, model: ModelConfig, bytes_per_block: int) -> EngineConfig:
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len: must be at most the model's context ({model.max_position_embeddings}), not {max_model_len}"
        )
    num_blocks = config.num_blocks
    if num_blocks is None and config.device == "cuda":
        # The least; the worker takes what its GPU has left once the model is loaded.
        num_blocks = 1 + num_blocks_for(max_model_len, config.block_size)
    elif num_blocks is None:
        num_blocks = _default_num_blocks(max_model_len, config.block_size, bytes_per_block)
    engine = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        block_size=config.block_size,
        max_num_seqs=config.num_seqs,
        max_num_batched_tokens=config.num_batched_tokens,
        max_waiting=config.max_waiting,
    )
    try:
        engine.check_pool_holds_context()
    except ValueError as exc:
        raise ConfigError(f"num_blocks: {exc} (a block is {bytes_per_block / 2**20:.2f} MiB)") from exc
    return engine


def _default_num_blocks(max_model_len: int, block_size: int, bytes_per_block: int) -> int:
    """About 1 GiB; more if two contexts need it, so that one long request does not stand alone; up to a limit."""
    two_contexts = 2 * num_blocks_for(max_model_len, block_size) * bytes_per_block
    return 1 + max(DEFAULT_POOL_BYTES, min(two_contexts, _MAX_DEFAULT_POOL_BYTES)) // bytes_per_block


def _worker_config(
    config: ClusterConfig, model: str, worker_id: str, engine: EngineConfig, threads: int
) -> WorkerConfig:
    finds_num_blocks = config.device == "cuda" and config.num_blocks is None
    return WorkerConfig(
        engine=engine,
        worker_id=worker_id,
        model=model,
        served_model_name=config.model_name,
        dtype=resolved_dtype(config.dtype, config.device),
        device=config.device,
        attention_backend=config.attention_backend,
        kv_cache_dtype=config.kv_cache_dtype,
        # Who shares a GPU has that share of its memory.
        gpu_memory_utilization=config.gpu_memory_utilization * config.gpus_per_worker if finds_num_blocks else None,
        enforce_eager=config.enforce_eager,
        threads=threads,
        lease_s=config.lease_s,
        handoff_timeout_s=config.handoff_timeout_s,
        request_timeout_s=config.request_timeout_s,
        max_repairs=config.max_repairs,
        drain_timeout_s=config.drain_timeout_s,
        # As with a model: no path of a worker depends on where it was started.
        internal_ca_file=_absolute(config.internal_ca_file),
        internal_cert_file=_absolute(config.internal_cert_file),
        internal_key_file=_absolute(config.internal_key_file),
        internal_server_name=config.internal_server_name,
        log_level=config.log_level,
        log_format=config.log_format,
    )


def _absolute(file: str | None) -> str | None:
    return None if file is None else str(Path(file).absolute())

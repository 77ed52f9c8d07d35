"""An engine put together from a configuration: executor, pool memory, scheduler."""

from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.engine import Engine
from engine.executor import Executor
from engine.memory import KVLayout
from kvtransfer.exported import ExportedMemory
from worker.config import WorkerConfig

# A graph costs memory and a moment at the start; with more requests than this a step is no longer bound by launches.
_MAX_GRAPH_BATCH = 256


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, and what else of it a worker tells its peers."""

    engine: Engine
    memory: ExportedMemory
    layout: KVLayout
    vocab_size: int
    dtype: str
    model_path: str
    device: str  # for people: "cpu", or the GPU's name and UUID


@dataclass(frozen=True, slots=True)
class _Built:
    """An executor without a pool yet."""

    executor: Executor
    config: EngineConfig  # with as many blocks as there will be
    dtype: str
    model_path: str
    device: str
    gpu: int | None  # its number in this process


def build_engine(config: WorkerConfig) -> BuiltEngine:
    """Loads the model and maps the pool; seconds of work, so not to be called on an event loop.

    Raises:
        ValueError: the pool is too small for one context, the model cannot be served, a file is broken, or the device
            is not there or not fit; the message says what is missing.
        FileNotFoundError: there is no such model.
    """
    config.engine.check_pool_holds_context()
    built = _hash_executor(config) if config.executor == "hash" else _torch_executor(config)
    layout = built.executor.layout
    memory = _pool_memory(built.config.num_blocks * layout.bytes_per_block, built.gpu)
    engine = Engine(built.config, built.executor, memory)
    return BuiltEngine(engine, memory, layout, built.executor.vocab_size, built.dtype, built.model_path, built.device)


def _hash_executor(config: WorkerConfig) -> _Built:
    from engine.hash_executor import HashExecutor

    executor = HashExecutor(block_size=config.engine.block_size)
    return _Built(executor, config.engine, "int64", "", "cpu", None)


def _torch_executor(config: WorkerConfig) -> _Built:
    # Imported here: neither torch nor a model is wanted in a process that only reads a configuration.
    from engine.model.locate import resolve_model

    path = resolve_model(config.model)  # before torch is loaded for nothing
    on_gpu = config.device != "cpu"
    if on_gpu:
        from engine.cuda.doctor import require_cuda

        require_cuda()
    from engine.torch_executor import TorchExecutor

    executor = TorchExecutor(
        path,
        dtype=config.dtype,
        block_size=config.engine.block_size,
        device=config.device,
        kv_cache_dtype=config.kv_cache_dtype,
        attention_backend=config.attention_backend,
        num_threads=config.threads,
        max_graph_batch=0 if config.enforce_eager else min(config.engine.max_num_seqs, _MAX_GRAPH_BATCH),
        max_model_len=config.engine.max_model_len,
    )
    if not on_gpu:
        return _Built(executor, config.engine, executor.dtype, str(path), "cpu", None)
    from engine.cuda.device import Gpu

    gpu = Gpu.of_torch(executor.device)
    engine_config = config.engine
    if config.gpu_memory_utilization is not None:
        fitting = gpu.num_blocks_that_fit(executor, engine_config, config.gpu_memory_utilization)
        if fitting < engine_config.num_blocks:
            raise ValueError(
                f"gpu_memory_utilization={config.gpu_memory_utilization} of {gpu.name} leaves room for {fitting} "
                f"blocks, and a context of max_model_len={engine_config.max_model_len} needs {engine_config.num_blocks}"
            )
        engine_config = replace(engine_config, num_blocks=fitting)
    return _Built(executor, engine_config, executor.dtype, str(path), str(gpu), gpu.number)


def _pool_memory(nbytes: int, gpu: int | None) -> ExportedMemory:
    if gpu is None:
        from kvtransfer.memfd import MemfdMemory

        memory = MemfdMemory(nbytes)
        memory.populate()
        return memory
    from kvtransfer.cuda_ipc import CudaIpcMemory

    return CudaIpcMemory(nbytes, gpu)

"""An engine put together from a configuration: executor, pool memory, scheduler."""

from dataclasses import dataclass

from engine.engine import Engine
from engine.executor import Executor
from engine.memory import KVLayout
from kvtransfer.memfd import MemfdMemory
from worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, and what else of it a worker tells its peers."""

    engine: Engine
    memory: MemfdMemory
    layout: KVLayout
    vocab_size: int
    dtype: str
    model_path: str


def build_engine(config: WorkerConfig) -> BuiltEngine:
    """Loads the model and maps the pool; seconds of work, so not to be called on an event loop.

    Raises:
        ValueError: the pool is too small for one context, the model cannot be served, a file is broken.
        FileNotFoundError: there is no such model.
    """
    config.engine.check_pool_holds_context()
    executor, dtype, model_path = _make_executor(config)
    memory = MemfdMemory(config.engine.num_blocks * executor.layout.bytes_per_block)
    engine = Engine(config.engine, executor, memory)
    return BuiltEngine(engine, memory, executor.layout, executor.vocab_size, dtype, model_path)


def _make_executor(config: WorkerConfig) -> tuple[Executor, str, str]:
    # Imported here: neither torch nor a model is wanted in a process that only reads a configuration.
    if config.executor == "hash":
        from engine.hash_executor import HashExecutor

        return HashExecutor(block_size=config.engine.block_size), "int64", ""
    from engine.model.locate import resolve_model

    path = resolve_model(config.model)  # before torch is loaded for nothing
    from engine.torch_executor import TorchExecutor

    executor = TorchExecutor(
        path,
        dtype=config.dtype,
        block_size=config.engine.block_size,
        attention_backend="cpu" if config.attention_backend == "auto" else config.attention_backend,
        num_threads=config.threads,
    )
    return executor, executor.dtype, str(path)

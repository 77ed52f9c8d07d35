"""Section `handoff`: prefilled in one process, decoded in another; the tokens must be those of one process alone."""

import asyncio
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.gpu.pipe import PipeServer, PipeTransport
from benchmarks.gpu.pools import new_pool
from benchmarks.gpu.section import Section, Setting
from benchmarks.gpu.tiny_model import VOCAB_SIZE, write_tiny_model
from benchmarks.gpu.workers import ConsumerEngine, HolderEngine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.memory import PrivateMemory
from engine.offline import generate
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.torch_executor import TorchExecutor
from kvtransfer.exported import ExportedMemory
from kvtransfer.ports import HolderPool
from kvtransfer.provider import Provider
from kvtransfer.puller import Puller
from kvtransfer.staging import stage_pool

# Prompts of several chunks: their blocks are announced while the next chunk is computed.
_CONFIG = EngineConfig(num_blocks=256, max_model_len=512, max_num_batched_tokens=64, max_num_seqs=16)
_STAGING_BYTES = 1 << 20  # a few blocks: they are used many times over
_LENGTHS = (1, 15, 16, 17, 40, 100, 200, 301)


def prompts() -> list[tuple[str, list[int], SamplingParams]]:
    """Greedy and sampled ones, with and without logprobs and penalties; each shares its first blocks with others."""
    kinds = (
        SamplingParams(max_tokens=32, temperature=0.0),
        SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=7),
        SamplingParams(max_tokens=32, temperature=1.0, top_k=50, repetition_penalty=1.1, seed=8, logprobs=2),
    )
    return [
        (f"{length}-{kind}", [(i * i * 31 + i) % VOCAB_SIZE for i in range(length)], params)
        for kind, params in enumerate(kinds)
        for length in _LENGTHS
    ]


def run(section: Section, setting: Setting) -> None:
    path = write_tiny_model(setting.folder / "tiny")
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    holder = spawn.Process(target=_hold, args=(there, path, setting.device), daemon=True)
    holder.start()
    there.close()
    try:
        outputs = asyncio.run(_decode(section, here, path, setting))
        holder.join(20)
        section.check("the holder ended well", holder.exitcode == 0, holder.exitcode)
    finally:
        holder.kill()
    expected = _expected(path)
    for way, (tokens, copied) in outputs.items():
        same = sum(tokens[key] == expected[key] for key in expected)
        section.check(f"tokens are the reference's, {way}", same == len(expected), f"{same} of {len(expected)}")
        section.check(f"blocks crossed, {way}", copied >= 40, copied)


def _executor(path: Path, device: str) -> tuple[TorchExecutor, ExportedMemory]:
    # float32, so that tokens can be expected to be equal; FlashInfer has no kernels for it.
    backend = "triton" if device != "cpu" else "cpu"
    executor = TorchExecutor(
        path,
        dtype="float32",
        device=device,
        attention_backend=backend,
        max_graph_batch=_CONFIG.max_num_seqs,
        max_model_len=_CONFIG.max_model_len,
    )
    return executor, new_pool(device, _CONFIG.num_blocks * executor.layout.bytes_per_block)


async def _decode(
    section: Section, connection: Connection, path: Path, setting: Setting
) -> dict[str, tuple[dict[str, list[int]], int]]:
    """For each way that blocks may take: all outputs, and how many blocks were copied."""
    executor, memory = _executor(path, setting.device)
    consumer = ConsumerEngine(Engine(_CONFIG, executor, memory))
    puller = consumer.puller = Puller(memory, executor.layout, consumer, PipeTransport(connection))
    outputs = {}
    for way, staged in (("pool to pool", False), ("through host memory", True)):
        if staged and not setting.on_gpu:
            continue  # a pool in host memory is never staged
        consumer.staged, consumer.copied_blocks = staged, 0
        consumer.engine.clear_cache()
        with section.part(f"hand-off, {way}"):
            await asyncio.gather(*(consumer.generate(*prompt) for prompt in prompts()))
            outputs[way] = (dict(consumer.outputs), consumer.copied_blocks)
    await puller.close()
    consumer.engine.check_integrity()
    assert consumer.engine.stats().num_active_blocks == 0, consumer.engine.stats()
    memory.close()
    return outputs


def _hold(connection: Connection, path: Path, device: str) -> None:
    async def serve() -> None:
        executor, memory = _executor(path, device)
        holder = HolderEngine(Engine(_CONFIG, executor, memory))
        pool = HolderPool(memory.handle("holder", executor.layout), executor.layout)
        staged = stage_pool(holder, memory, executor.layout, "holder", _STAGING_BYTES)
        await PipeServer(connection, Provider(pool, holder, staged=staged)).serve()
        if staged is not None:
            await staged.close()
        holder.engine.check_integrity()
        assert holder.engine.stats().num_active_blocks == 0, holder.engine.stats()
        memory.close()

    asyncio.run(serve())


def _expected(path: Path) -> dict[str, list[int]]:
    executor = TorchExecutor(path, dtype="float32", attention_backend="reference")
    engine = Engine(_CONFIG, executor, PrivateMemory(_CONFIG.num_blocks * executor.layout.bytes_per_block))
    requests = [Request(key, prompt, params, arrival_time=0.0) for key, prompt, params in prompts()]
    return generate(engine, requests, lambda: 0.0)

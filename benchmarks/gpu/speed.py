"""Section `speed`: figures. Each is beside what bounds it, taken in the same minute on the same card."""

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection

import torch

from benchmarks.gpu.attention_case import Case, Step
from benchmarks.gpu.cached_pool import FullHolder, WaitingConsumer
from benchmarks.gpu.pipe import PipeServer, PipeTransport
from benchmarks.gpu.pools import as_blocks, new_pool
from benchmarks.gpu.section import Section, Setting
from benchmarks.gpu.tiny_model import write_model
from engine.attention import get_backend
from engine.config import EngineConfig
from engine.engine import Engine
from engine.memory import KVLayout
from engine.offline import generate
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.torch_executor import TorchExecutor
from kvtransfer.mapping import PeerPool, open_mapping
from kvtransfer.ports import HolderPool
from kvtransfer.provider import Provider
from kvtransfer.puller import Puller

# What "8B" means below: Llama 3.1 8B's: 32 layers, 8 KV heads of 128, bfloat16; 128 KiB a token.
_BLOCK_8B = 32 * 2 * 8 * 16 * 128 * 2
_BLOCK_SIZE = 16
_HEAD_START_CYCLES = 1_000_000  # half a millisecond


def run(section: Section, setting: Setting) -> None:
    bytes_per_block = _BLOCK_8B if setting.on_gpu else 1 << 16
    layout = KVLayout(_BLOCK_SIZE, bytes_per_block, bytes(16))
    with section.part("gathering blocks"):
        _gather(section, setting, layout)
    with section.part("hand-offs"):
        _handoffs(section, setting, layout)
    if setting.on_gpu:
        with section.part("kernels"):
            time_kernels(section, setting, ("triton",))
    with section.part("decoding"):
        _decode(section, setting)


# --- moving blocks


def _gather(section: Section, setting: Setting, layout: KVLayout) -> None:
    num_blocks = 512
    source, target = (new_pool(setting.device, num_blocks * layout.bytes_per_block) for _ in range(2))
    here, there = as_blocks(source, layout.bytes_per_block), as_blocks(target, layout.bytes_per_block)
    here.fill_(1)
    handle = source.handle("here", layout)
    peer, copies = PeerPool(handle, open_mapping(handle)), target.copies(layout)
    in_a_row = list(range(num_blocks))
    scattered = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    nbytes = num_blocks * layout.bytes_per_block

    def plain() -> None:
        there.copy_(here)
        _synchronize(setting)

    ways: dict[str, Callable[[], object]] = {
        "plain device copy": plain,
        "blocks, in a row": lambda: copies.copy(peer, in_a_row, in_a_row, None),
        "blocks, scattered": lambda: copies.copy(peer, scattered, in_a_row, None),
    }
    seconds = {name: _median_seconds(way, setting) for name, way in ways.items()}
    for name, took in seconds.items():
        section.figure(f"{name}, {nbytes / 2**20:.0f} MiB", nbytes / took / 1e9, "GB/s")
    share = seconds["plain device copy"] / seconds["blocks, scattered"]
    section.figure("blocks scattered / plain device copy", share, "×")
    copies.close()
    peer.retire()
    source.close()
    target.close()


def _handoffs(section: Section, setting: Setting, layout: KVLayout) -> None:
    spawn = multiprocessing.get_context("spawn")
    lengths = [4096, 32_768]
    if setting.on_gpu:
        free, _ = torch.cuda.mem_get_info()
        while lengths and 2.2 * lengths[-1] // _BLOCK_SIZE * layout.bytes_per_block > 0.8 * free:
            section.note(f"no hand-off of {lengths.pop()} tokens: the GPU has {free / 2**30:.0f} GiB free")
    if not lengths:
        return
    pool_bytes = (lengths[-1] // _BLOCK_SIZE + 1) * layout.bytes_per_block
    here, there = spawn.Pipe()
    holder = spawn.Process(target=_hold, args=(there, setting.device, layout, pool_bytes), daemon=True)
    holder.start()
    there.close()
    kv = "8B-shaped KV" if setting.on_gpu else "small KV"
    try:
        for length, milliseconds, copy_milliseconds in asyncio.run(_pull(here, setting, layout, pool_bytes, lengths)):
            section.figure(f"hand-off of {length} tokens, {kv}", milliseconds, "ms")
            section.figure(f"of it copies, {length} tokens", copy_milliseconds, "ms")
        holder.join(20)
    finally:
        holder.kill()


async def _pull(
    connection: Connection, setting: Setting, layout: KVLayout, pool_bytes: int, lengths: list[int]
) -> list[tuple[int, float, float]]:
    memory = new_pool(setting.device, pool_bytes)
    port = WaitingConsumer()
    puller = Puller(memory, layout, port, PipeTransport(connection))
    taken = []
    for length in lengths:
        num_blocks = length // _BLOCK_SIZE
        await port.pull(puller, layout.fingerprint, num_blocks)
        runs = [await port.pull(puller, layout.fingerprint, num_blocks) for _ in range(5)]
        seconds = statistics.median(took for took, _ in runs)
        copying = statistics.median(result.stats.seconds for _, result in runs)
        taken.append((length, seconds * 1e3, copying * 1e3))
    await puller.close()
    memory.close()
    return taken


def _hold(connection: Connection, device: str, layout: KVLayout, pool_bytes: int) -> None:
    async def serve() -> None:
        memory = new_pool(device, pool_bytes)
        pool = HolderPool(memory.handle("holder", layout), layout)
        await PipeServer(connection, Provider(pool, FullHolder())).serve()
        memory.close()

    asyncio.run(serve())


# --- computing


def time_kernels(section: Section, setting: Setting, names: Sequence[str]) -> None:
    """Attention of one layer of an 8B model, by each of these backends."""
    decode = Case("decode, 32 × 4k", ((4095, 1),) * 32, 32, 8, 128)
    long = Case("decode, 1 × 32k", ((32_767, 1),), 32, 8, 128)
    prefill = Case("prefill, 1 × 4k", ((0, 4096),), 32, 8, 128)
    kv_bytes = 32 * 4096 * 2 * 8 * 128 * 2
    times: dict[str, float] = {}
    for name in names:
        backend = get_backend(name, device=setting.device)
        for case in (decode, long, prefill):
            backend.prepare(case.shape)
            step = Step(case, setting.device)
            step.run(backend)
            times[f"{name} {case.name}"] = took = _median_kernel_seconds(partial(step.attend, backend))
            section.figure(f"{name}: attention of an 8B layer, {case.name}", took * 1e6, "µs")
        section.figure(f"{name}: decode reads KV at", kv_bytes / times[f"{name} {decode.name}"] / 1e9, "GB/s")
    for kind in (decode.name, long.name, prefill.name):
        if f"flashinfer {kind}" in times:
            ratio = times[f"triton {kind}"] / times[f"flashinfer {kind}"]
            section.figure(f"{kind}: triton's time / flashinfer's", ratio, "×")


def _decode(section: Section, setting: Setting) -> None:
    """A Llama 3.2 1B of random numbers; on a CPU a model of a thousandth."""
    if setting.on_gpu:
        path = write_model(
            setting.folder / "1b", vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_layers=16,
            num_heads=32, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16, device=setting.device,
        )  # fmt: skip
    else:
        path = write_model(
            setting.folder / "small", vocab_size=1000, hidden_size=64, intermediate_size=128, num_layers=2,
            num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32,
        )  # fmt: skip
    model = "1B-shaped" if setting.on_gpu else "small model"
    batches = (1, 8, 32, 64) if setting.on_gpu else (1, 8)
    config = EngineConfig(num_blocks=2048, max_model_len=4200, max_num_batched_tokens=4096, max_num_seqs=64)
    for graphs in (64, 0) if setting.on_gpu else (0,):
        kind = "graphs" if graphs else "no graphs"
        executor = TorchExecutor(
            path,
            attention_backend="triton" if setting.on_gpu else "cpu",
            device=setting.device,
            max_graph_batch=graphs,
            max_model_len=config.max_model_len,
        )
        memory = new_pool(setting.device, config.num_blocks * executor.layout.bytes_per_block)
        engine = Engine(config, executor, memory)
        run_batch = _Batches(engine)
        run_batch(1, 16, 4)
        for batch in batches:
            section.figure(f"decode, batch {batch}, {kind}, {model}", run_batch(batch, 128, 64), "tokens/s")
        if graphs or not setting.on_gpu:
            section.figure(f"prefill, 4 × 1,024, {model}", run_batch.prefill(4, 1024), "tokens/s")


class _Batches:
    """Measures an engine, batch by batch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_prompts = 0

    def _requests(self, batch: int, num_prompt_tokens: int, max_tokens: int) -> list[Request]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        requests = []
        for _ in range(batch):
            self._num_prompts += 1
            prompt = [(self._num_prompts * 7919 + i * 31) % 1000 for i in range(num_prompt_tokens)]
            requests.append(Request(str(self._num_prompts), prompt, params, arrival_time=0.0))
        return requests

    def __call__(self, batch: int, num_prompt_tokens: int, max_tokens: int) -> float:
        """Decoded tokens a second, prompts not counted."""
        for request in self._requests(batch, num_prompt_tokens, max_tokens):
            self._engine.add_request(request)
        tokens = 0
        while tokens < batch:
            tokens += len(self._engine.step(0.0).outputs)
        began, decoded = time.perf_counter(), 0
        while self._engine.has_work:
            decoded += len(self._engine.step(0.0).outputs)
        return decoded / (time.perf_counter() - began)

    def prefill(self, batch: int, num_prompt_tokens: int) -> float:
        """Prompt tokens a second."""
        requests = self._requests(batch, num_prompt_tokens, 1)
        began = time.perf_counter()
        generate(self._engine, requests, lambda: 0.0)
        return batch * num_prompt_tokens / (time.perf_counter() - began)


# --- time


def _synchronize(setting: Setting) -> None:
    if setting.on_gpu:
        torch.cuda.synchronize()


def _median_seconds(call: Callable[[], object], setting: Setting, repeats: int = 9) -> float:
    call()
    taken = []
    for _ in range(repeats):
        _synchronize(setting)
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _median_kernel_seconds(launch: Callable[[], object], repeats: int = 20) -> float:
    """On the device alone: it is kept busy until everything is launched."""
    for _ in range(3):
        launch()
    taken = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        launch()
        end.record()
        end.synchronize()
        taken.append(float(start.elapsed_time(end)) / 1e3)
    return statistics.median(taken)

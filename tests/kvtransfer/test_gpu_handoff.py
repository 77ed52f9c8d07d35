"""Whole hand-offs between two engines on played GPUs that do all work as late as they may.

The engines are real, the model is hashes of the cache, and its writes are work of a stream, of which only a sampled
token is waited for: what is pulled in between is pulled before it is there, unless the fence is waited for.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.gpu.workers import ConsumerEngine, HolderEngine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.executor import ModelOutput, ScheduledRequest, SchedulerOutput
from engine.hash_executor import HashExecutor, expected_tokens
from engine.memory import DeviceMemory, PoolMemory
from engine.sampling_params import SamplingParams
from fake_block_kernel import FakeGpuMemory
from fake_cuda import FakeMachine, FakeProcess, importing
from kvtransfer.cuda_ipc import CudaIpcMapping
from kvtransfer.loopback import LoopbackTransport
from kvtransfer.ports import HolderPool
from kvtransfer.provider import Provider
from kvtransfer.puller import Puller

VOCAB_SIZE = 97
BLOCK_SIZE = 4
# Chunks of two blocks: a prompt's blocks are announced in several steps, of which only the last is waited for.
CONFIG = EngineConfig(num_blocks=48, max_model_len=64, block_size=BLOCK_SIZE, max_num_batched_tokens=8, max_num_seqs=4)


class LateHashExecutor(HashExecutor):
    """A `HashExecutor` on a played GPU: a step's writes are work of its stream, and only a sampled token is waited
    for."""

    def __init__(self, process: FakeProcess, device: int) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, block_size=BLOCK_SIZE)
        self._process = process
        process.set_device(device)
        self._stream = process.stream_create()
        self._device = device

    def bind(self, memory: PoolMemory, num_blocks: int) -> None:
        assert isinstance(memory, FakeGpuMemory)
        self._memory: DeviceMemory = memory
        slots = np.frombuffer(self._process.view(memory.pointer, memory.nbytes), "<i8")
        self._pool = slots.reshape(num_blocks, BLOCK_SIZE)

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        self._process.set_device(self._device)
        for request in map(_frozen, step.requests):
            self._process.launch(self._stream, lambda request=request: self._write(self._pool, request))
        if all(request.sampling is None for request in step.requests):
            return ModelOutput(fence=self._memory.record_fence(self._stream))
        self._process.stream_synchronize(self._stream)
        return ModelOutput(
            {r.request_id: self._sample(self._pool, r, r.sampling) for r in step.requests if r.sampling is not None}
        )

    def close(self) -> None:
        self._process.set_device(self._device)
        self._process.stream_synchronize(self._stream)
        self._process.stream_destroy(self._stream)


def _frozen(request: ScheduledRequest) -> ScheduledRequest:
    """What a launch has read of it: its lists are the request's own, and go on."""
    tables = tuple(tuple(table) for table in request.block_tables)
    return replace(request, token_ids=tuple(request.token_ids), block_tables=tables)


class Pair:
    """A holder and a consumer, each a process with a GPU."""

    def __init__(self, machine: FakeMachine, consumer_device: int) -> None:
        self.machine = machine
        self.processes = [machine.process(), machine.process()]
        self.executors = [
            LateHashExecutor(process, device)
            for process, device in zip(self.processes, (0, consumer_device), strict=True)
        ]
        layout = self.executors[0].layout
        nbytes = CONFIG.num_blocks * layout.bytes_per_block
        self.memories = [
            FakeGpuMemory(nbytes, device, process)
            for process, device in zip(self.processes, (0, consumer_device), strict=True)
        ]
        engines = [Engine(CONFIG, e, memory) for e, memory in zip(self.executors, self.memories, strict=True)]
        self.holder, self.consumer = HolderEngine(engines[0]), ConsumerEngine(engines[1])
        provider = Provider(HolderPool(self.memories[0].handle("holder", layout), layout), self.holder)
        transport = LoopbackTransport()
        transport.providers["holder"] = provider
        self.puller = self.consumer.puller = Puller(self.memories[1], layout, self.consumer, transport)

    async def generate(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        requests = (self.consumer.generate(str(i), prompt, PARAMS) for i, prompt in enumerate(prompts))
        return await asyncio.gather(*requests)

    async def close(self) -> None:
        await self.puller.close()
        for worker in (self.holder, self.consumer):
            worker.engine.check_integrity()
            assert worker.engine.stats().num_active_blocks == 0
        for executor in self.executors:
            executor.close()
        for memory in self.memories:
            memory.close()
        self.machine.assert_nothing_left()


PARAMS = SamplingParams(max_tokens=6, temperature=0.0)
# Two share their first blocks: what the holder has cached is lent while the step that computed it may still run.
PROMPTS = [
    [(7 * salt + 3 * i) % VOCAB_SIZE for i in range(length)] for salt, length in enumerate((1, 4, 9, 22, 31, 40))
]
PROMPTS.append([*PROMPTS[-1][:24], 5, 6, 7])
EXPECTED = [expected_tokens(prompt, PARAMS, VOCAB_SIZE) for prompt in PROMPTS]


@pytest.mark.parametrize("consumer_device", [0, 1], ids=["one GPU", "two GPUs"])
async def test_tokens_are_those_of_one_engine_when_chunks_are_pulled_before_they_are_computed(
    consumer_device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    wait_fence = CudaIpcMapping.wait_fence

    def counted(mapping: CudaIpcMapping, stream: int, fence: int) -> None:
        waited.append(fence)
        wait_fence(mapping, stream, fence)

    monkeypatch.setattr(CudaIpcMapping, "wait_fence", counted)
    pair = Pair(FakeMachine(2), consumer_device)
    with importing(pair.processes[1], consumer_device):
        assert await pair.generate(PROMPTS) == EXPECTED
        assert pair.consumer.copied_blocks >= sum(len(prompt) // BLOCK_SIZE for prompt in PROMPTS) // 2
        # What a copy that does not wait reads, `test_cuda_copies.py` shows.
        assert len(waited) >= 3, "blocks of chunks that were still under way"
        await pair.close()

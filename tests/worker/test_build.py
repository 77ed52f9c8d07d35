"""An engine put together for a GPU, and a worker around it: the GPU and what runs on it are played."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from decode_worker import DecodeWorker
from engine import torch_executor
from engine.config import EngineConfig
from engine.cuda import device, doctor
from engine.hash_executor import HashExecutor
from fake_block_kernel import FakeGpuMemory
from fake_cuda import FakeMachine
from kvtransfer.messages import Accepted, CachedSource, Open
from kvtransfer.wire import request_to_wire, response_from_wire
from prefill_worker import PrefillWorker
from tandem.v1 import exchange_pb2_grpc, worker_pb2, worker_pb2_grpc
from worker import build
from worker.config import WorkerConfig
from worker.host import host_id
from worker.node import WorkerNode

ENGINE = EngineConfig(num_blocks=33, max_model_len=512)
CONFIG = WorkerConfig(engine=ENGINE, device="cuda:1", gpu_memory_utilization=0.9)
GPU = device.Gpu(1, "NVIDIA H200", "1234")


class PlayedExecutor(HashExecutor):
    """Takes what a `TorchExecutor` takes; its model is hashes, which it keeps beside the pool."""

    asked_for: dict[str, Any]
    dtype, device = "bfloat16", "cuda:1"

    def __init__(self, path: Path, **options: Any) -> None:
        type(self).asked_for = options
        super().__init__(block_size=options["block_size"])

    def bind(self, memory: object, num_blocks: int) -> None:
        self.num_blocks = num_blocks


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with two GPUs, on which a pool of 200 blocks fits; what was done to it, in order."""
    calls: list[str] = []
    process = FakeMachine(gpus=2).process()

    def new_pool(nbytes: int, number: int | None) -> FakeGpuMemory:
        assert number is not None
        calls.append(f"pool of {nbytes // (ENGINE.block_size * 8)} blocks on GPU {number}")
        return FakeGpuMemory(nbytes, number, process)

    monkeypatch.setattr(torch_executor, "TorchExecutor", PlayedExecutor)
    monkeypatch.setattr(doctor, "require_cuda", lambda: calls.append("checked"))
    monkeypatch.setattr(device.Gpu, "of_torch", classmethod(lambda cls, device: GPU))
    monkeypatch.setattr(device.Gpu, "num_blocks_that_fit", lambda self, executor, config, utilization: 200)
    monkeypatch.setattr(build, "_pool_memory", new_pool)
    return calls


def test_the_pool_is_as_large_as_the_gpus_share_allows(calls: list[str]) -> None:
    built = build.build_engine(CONFIG)
    assert calls == ["checked", "pool of 200 blocks on GPU 1"], "before anything is loaded it is known to be fit"
    assert built.engine.config == replace(ENGINE, num_blocks=200)
    assert (built.dtype, built.device) == ("bfloat16", "cuda: NVIDIA H200, GPU-1234")
    built.memory.close()


def test_the_pool_is_what_was_asked_for_without_a_share(calls: list[str]) -> None:
    built = build.build_engine(replace(CONFIG, gpu_memory_utilization=None))
    assert built.engine.config == ENGINE
    assert calls[-1] == "pool of 33 blocks on GPU 1"
    built.memory.close()


def test_a_share_that_does_not_hold_one_context_is_refused_with_the_numbers(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.Gpu, "num_blocks_that_fit", lambda self, executor, config, utilization: 32)
    with pytest.raises(ValueError, match=r"utilization=0\.9 of NVIDIA H200 leaves room for 32 blocks, .*=512 needs 33"):
        build.build_engine(CONFIG)


def test_a_machine_that_is_not_fit_is_refused_before_anything_is_loaded(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ValueError("no driver")

    monkeypatch.setattr(doctor, "require_cuda", refuse)
    with pytest.raises(ValueError, match="no driver"):
        build.build_engine(CONFIG)
    assert calls == []


def test_the_executor_is_told_all_that_the_configuration_says(calls: list[str]) -> None:
    config = replace(CONFIG, kv_cache_dtype="fp8_e4m3", attention_backend="triton", dtype="bfloat16", threads=3)
    build.build_engine(config).memory.close()
    assert PlayedExecutor.asked_for == {
        "dtype": "bfloat16",
        "block_size": 16,
        "device": "cuda:1",
        "kv_cache_dtype": "fp8_e4m3",
        "attention_backend": "triton",
        "num_threads": 3,
        "max_graph_batch": 64,
        "max_model_len": 512,
    }
    build.build_engine(replace(config, enforce_eager=True)).memory.close()
    assert PlayedExecutor.asked_for["max_graph_batch"] == 0


@pytest.mark.parametrize("kind", [PrefillWorker, DecodeWorker])
async def test_a_worker_says_where_it_is_and_what_it_has(calls: list[str], kind: type[WorkerNode]) -> None:
    worker = kind(CONFIG)
    address = await worker.start()
    async with grpc.aio.insecure_channel(address) as channel:
        said = await worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest())
    assert said.num_blocks == 200
    assert said.device == "cuda: NVIDIA H200, GPU-1234"
    assert said.host_id == host_id() != ""
    await worker.stop()


async def test_a_worker_on_a_gpu_hands_out_its_pool_and_copies_in_host_memory(calls: list[str]) -> None:
    worker = PrefillWorker(CONFIG)
    address = await worker.start()
    kinds = []
    async with grpc.aio.insecure_channel(address) as channel:
        for staged in (False, True):
            nothing = CachedSource((bytes(16),))
            open = Open(f"staged {staged}", "r", "consumer", b"hash-executor-v1", 60.0, nothing, staged)
            call = exchange_pb2_grpc.KvExchangeStub(channel).Handoff()
            await call.write(request_to_wire(open))
            accepted = response_from_wire(await call.read())
            assert isinstance(accepted, Accepted)
            kinds.append(accepted.pool.kind)
            call.cancel()
    assert kinds == ["cuda_ipc", "memfd"]
    await worker.stop()

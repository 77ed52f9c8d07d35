"""A decode worker on a CPU and prefill workers whose pool it cannot map, behind real gRPC: clients notice nothing."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

import worker.node
from decode_worker import DecodeWorker
from engine.config import EngineConfig
from engine.hash_executor import expected_prompt_logprobs, expected_tokens
from engine.sampling_params import SamplingParams
from gateway_end import PATIENCE_S, GatewayEnd
from kvtransfer.mapping import HostMapping, open_mapping
from kvtransfer.messages import HandoffTimes
from kvtransfer.ports import HolderPool, HolderPort
from kvtransfer.provider import Provider
from kvtransfer.sampling_wire import prompt_logprobs_from_wire
from kvtransfer.staging import StagedPort
from kvtransfer.staging_area import StagingArea
from prefill_worker import PrefillWorker
from staged_holders import HostStagingCopies
from worker.config import WorkerConfig

ENGINE = EngineConfig(num_blocks=64, max_model_len=512, max_num_batched_tokens=64)
NUM_SLOTS = 5


class Workers:
    """A decode worker, and a prefill worker whose pool is in host memory, but says that it is on a GPU."""

    async def start(self) -> None:
        self.decode = DecodeWorker(WorkerConfig(worker_id="d0", executor="hash", engine=ENGINE))
        self.decode_address = await self.decode.start()

    async def start_prefill(self, monkeypatch: pytest.MonkeyPatch, *, stages: bool = True) -> None:
        def make_provider(pool: HolderPool, port: HolderPort, times: HandoffTimes, **_: object) -> Provider:
            mapping = open_mapping(pool.handle)
            assert isinstance(mapping, HostMapping)
            area = StagingArea(pool.layout, NUM_SLOTS * pool.layout.bytes_per_block)
            copies = HostStagingCopies(mapping.buffer, area.memory.buffer, pool.layout.bytes_per_block)
            mapping.close()
            self.staged = StagedPort(port, area, copies, pool.handle.instance_id)
            on_gpu = HolderPool(replace(pool.handle, kind="cuda_ipc", raw=b"out of reach"), pool.layout)
            return Provider(on_gpu, port, times, staged=self.staged if stages else None)

        with monkeypatch.context() as patch:
            patch.setattr(worker.node, "Provider", make_provider)
            self.prefill = PrefillWorker(WorkerConfig(worker_id="p0", executor="hash", engine=ENGINE))
            self.prefill_peer = ("p0", await self.prefill.start())

    async def stop(self) -> None:
        """Which proves that neither blocks nor slots are held."""
        await self.decode.stop()
        async with asyncio.timeout(PATIENCE_S):
            await self.prefill._provider.wait_idle()
        await self.staged.close()
        self.staged.check_integrity()
        assert self.staged._area.num_free == NUM_SLOTS
        await self.prefill.stop()


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    workers = Workers()
    await workers.start()
    yield workers
    await workers.stop()


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + i * i * 31 + i) % 1000 for i in range(length)]


async def test_tokens_are_the_same_and_only_the_counters_tell(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await workers.start_prefill(monkeypatch)
    params = SamplingParams(max_tokens=20, temperature=0.0)
    async with GatewayEnd(workers.decode_address) as gateway:
        for i, length in enumerate([200, 200, 33, 480, 1]):
            prompt = prompt_of(length, seed=max(i, 1))
            seen = await gateway.submit(f"r{i}", prompt, params, prefill=workers.prefill_peer)
            await gateway.until(lambda seen=seen: seen.is_over)
            assert seen.token_ids == expected_tokens(prompt, params, 1000, max_model_len=512)
            assert seen.need_prefill == [], "the gateway is not asked for another prefill worker"
    taken = workers.decode._role.puller.counters
    given = workers.prefill._provider.counters
    assert (taken.unmappable_pools, taken.staged, taken.committed, taken.lost.total()) == (1, 5, 5, 1)
    assert given.staged == 5


async def test_choices_of_a_prompt_come_staged_too(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    await workers.start_prefill(monkeypatch)
    params = SamplingParams(max_tokens=20, prompt_logprobs=1)
    async with GatewayEnd(workers.decode_address) as gateway:
        for turn, length in enumerate([200, 33]):  # the first hand-off finds that the pool cannot be mapped
            prompt = prompt_of(length)
            seeds = {f"r{turn}.{i}": i for i in range(4)}
            await gateway.submit(f"r{turn}", prompt, params, prefill=workers.prefill_peer, choices=seeds)
            await gateway.until(lambda seeds=seeds: all(gateway.seen[name].is_over for name in seeds))
            for name, seed in seeds.items():
                expected = expected_tokens(prompt, replace(params, seed=seed), 1000, max_model_len=512)
                assert gateway.seen[name].token_ids == expected
                assert gateway.seen[name].need_prefill == []
            (wire,) = [gateway.seen[name].prompt_logprobs for name in seeds if gateway.seen[name].prompt_logprobs]
            assert prompt_logprobs_from_wire(wire, prompt) == expected_prompt_logprobs(prompt, params, 1000)


async def test_many_requests_at_once_share_a_few_slots(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    await workers.start_prefill(monkeypatch)
    params = SamplingParams(max_tokens=10, temperature=0.0)
    async with GatewayEnd(workers.decode_address) as gateway:
        for i in range(24):
            prompt = prompt_of(20 + 17 * i, seed=i)
            await gateway.submit(f"r{i}", prompt, params, prefill=workers.prefill_peer)
            if i % 4 == 3:
                await gateway.abort(f"r{i - 1}")
        lasting = [i for i in range(24) if i % 4 != 2]
        await gateway.until(lambda: all(gateway.seen[f"r{i}"].is_over for i in lasting))
        for i in lasting:
            expected = expected_tokens(prompt_of(20 + 17 * i, seed=i), params, 1000, max_model_len=512)
            assert gateway.seen[f"r{i}"].token_ids == expected
            assert gateway.seen[f"r{i}"].need_prefill == []
    assert workers.decode._role.puller.counters.unmappable_pools == 1


async def test_a_prefill_worker_that_stages_nothing_is_left_for_another(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await workers.start_prefill(monkeypatch, stages=False)
    prompt, params = prompt_of(100), SamplingParams(max_tokens=10, temperature=0.0)
    async with GatewayEnd(workers.decode_address) as gateway:
        seen = await gateway.submit("r", prompt, params, prefill=workers.prefill_peer)
        await gateway.until(lambda: bool(seen.need_prefill))
        assert "hands out no copies in host memory" in seen.need_prefill[0].reason
        await gateway.assign("r", None)
        await gateway.until(lambda: seen.is_over)
        assert seen.token_ids == expected_tokens(prompt, params, 1000, max_model_len=512)

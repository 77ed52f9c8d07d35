"""Workers under Ray: started side by side, watched, brought back. Real ones, that hash instead of computing."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from cluster.actors import RayMachines, WorkerActor, _ended_in_time, connect
from cluster.fleet import Fleet, FleetError
from cluster.membership import Membership
from cluster.worker_info import Role, WorkerInfo
from cluster.worker_link import WorkerLink
from cluster.worker_plan import PlannedWorker
from engine.config import EngineConfig
from worker.config import WorkerConfig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

# Never reached unless something is broken: a process starts in seconds, on a busy machine in some more.
PATIENCE_S = 120.0


class RecordingMembership(Membership):
    """The real one, whose every change can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.told: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def add_worker(self, address: str) -> WorkerLink:
        self.told.put_nowait(("add", address))
        return super().add_worker(address)

    async def remove_worker(self, address_or_id: str) -> None:
        self.told.put_nowait(("remove", address_or_id))
        await super().remove_worker(address_or_id)

    async def next_told(self) -> tuple[str, str]:
        return await asyncio.wait_for(self.told.get(), PATIENCE_S)


def planned(role: Role, worker_id: str, num_blocks: int = 64) -> PlannedWorker:
    engine = EngineConfig(num_blocks=num_blocks, max_model_len=256)
    return PlannedWorker(role, WorkerConfig(engine=engine, worker_id=worker_id, executor="hash", threads=1))


@pytest.fixture
async def membership() -> AsyncIterator[RecordingMembership]:
    membership = RecordingMembership()
    yield membership
    await membership.close()


async def ready(membership: Membership) -> dict[str, WorkerInfo]:
    async with asyncio.timeout(PATIENCE_S):
        await membership.wait_ready(prefill_workers=1, decode_workers=1)
    return {status.info.worker_id: status.info for status in membership.workers() if status.info is not None}


async def test_worker_that_is_killed_comes_back_as_a_new_instance_of_the_same_worker(
    membership: RecordingMembership,
) -> None:
    fleet = Fleet([planned(Role.PREFILL, "prefill-0"), planned(Role.DECODE, "decode-0")], membership, RayMachines())
    try:
        await fleet.start()
        before = await ready(membership)
        assert {await membership.next_told(), await membership.next_told()} == {
            ("add", info.address) for info in before.values()
        }
        assert {(info.worker_id, info.role) for info in before.values()} == {
            ("prefill-0", Role.PREFILL),
            ("decode-0", Role.DECODE),
        }

        process_ids = await fleet.process_ids()
        assert len({*process_ids.values(), os.getpid()}) == 3
        os.kill(process_ids["prefill-0"], signal.SIGKILL)
        assert await membership.next_told() == ("remove", before["prefill-0"].address)
        told, new_address = await membership.next_told()
        after = await ready(membership)
        assert (told, new_address) == ("add", after["prefill-0"].address)
        assert after["prefill-0"].instance_id != before["prefill-0"].instance_id
        assert after["decode-0"] == before["decode-0"]
        assert {status.address for status in membership.workers()} == {info.address for info in after.values()}
        assert fleet.num_restarts == 1
    finally:
        await fleet.stop(timeout_s=30.0)


async def test_worker_that_cannot_start_says_why_in_a_sentence(membership: RecordingMembership) -> None:
    # Refused by the worker itself: it is not asked for through a configuration of the cluster.
    workers = [planned(Role.DECODE, "decode-0"), planned(Role.DECODE, "decode-1", num_blocks=4)]
    fleet = Fleet(workers, membership, RayMachines())
    try:
        with pytest.raises(FleetError, match=r"^decode-1 cannot start: a pool of num_blocks=4 ") as caught:
            await fleet.start()
        assert len(str(caught.value).splitlines()) == 1
    finally:
        await fleet.stop(timeout_s=30.0)
    await fleet.stop(timeout_s=30.0)


async def test_cluster_without_room_is_named_with_what_was_asked(membership: RecordingMembership) -> None:
    worker = planned(Role.DECODE, "decode-0")
    huge = replace(worker, config=replace(worker.config, threads=1000))
    prefill = replace(huge, role=Role.PREFILL)
    fleet = Fleet([prefill, huge], membership, RayMachines(), start_timeout_s=1.0)
    with pytest.raises(FleetError, match="no room for 2 workers of 1000 CPUs each on one machine; waited 1 s"):
        await fleet.start()
    await fleet.stop(timeout_s=1.0)


class FailingWorker:
    async def start(self) -> str:
        return "127.0.0.1:1"

    async def stop(self) -> None:
        return

    async def wait(self) -> None:
        raise RuntimeError("the engine failed")


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_process_goes_with_a_worker_that_fails_but_not_with_one_that_is_stopped(
    monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    exits: list[int] = []
    monkeypatch.setattr("cluster.actors._make_worker", lambda planned: FailingWorker())
    monkeypatch.setattr("os._exit", exits.append)
    actor = WorkerActor(planned(Role.DECODE, "decode-0"), on_node_address=False)
    assert await actor.start() == "127.0.0.1:1"
    if is_stopped:
        await actor.stop()
    assert await actor.wait()
    assert exits == ([] if is_stopped else [1])


@pytest.mark.parametrize(("visible", "device"), [("1", "cuda:0"), ("0,1", "cuda:1")])
async def test_worker_is_told_the_gpu_that_ray_gave_it(
    monkeypatch: pytest.MonkeyPatch, visible: str, device: str
) -> None:
    made: list[PlannedWorker] = []

    def make(worker: PlannedWorker) -> FailingWorker:
        made.append(worker)
        return FailingWorker()

    monkeypatch.setattr("cluster.actors._make_worker", make)
    monkeypatch.setattr("ray.get_gpu_ids", lambda: [1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    worker = planned(Role.DECODE, "decode-0")
    on_gpu = replace(worker, config=replace(worker.config, device="cuda"), num_gpus=1.0)
    for each in (worker, on_gpu):
        await WorkerActor(each, on_node_address=False).start()
    assert [worker.config.device for worker in made] == ["cpu", device]


async def test_process_that_has_started_no_worker_has_none_to_wait_for() -> None:
    actor = WorkerActor(planned(Role.DECODE, "decode-0"), on_node_address=False)
    assert not await actor.wait()


def test_ray_address_where_nobody_answers_is_known_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FleetError, match=f"^nothing answers at the Ray address '{address}'$"):
            connect(address, num_cpus=1)


async def test_call_to_a_ray_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr("cluster.actors._RAY_END_S", 0.0)

    def hang() -> None:
        answered.wait()

    assert not await _ended_in_time(hang)
    answered.set()
    monkeypatch.setattr("cluster.actors._RAY_END_S", 600.0)
    assert await _ended_in_time(lambda: None)

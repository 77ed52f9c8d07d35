"""Who is launched, watched and launched again, and when: with processes that do what a test says."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from cluster.fleet import Fleet, FleetError, ProcessLost, WorkerRaised
from cluster.placement import PlacementGroup
from cluster.worker_info import Role
from cluster.worker_plan import PlannedWorker
from engine.config import EngineConfig
from worker.config import WorkerConfig


class Call:
    """A call to a process: each is answered by the test, in order, before or after it comes."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()

    async def __call__(self) -> Any:
        call = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(call)
        return await call

    async def next(self) -> asyncio.Future[Any]:
        return await self._asked.get()


class FakeProcess:
    def __init__(self) -> None:
        self.start, self.wait = Call(), Call()
        self.end: Exception | None = None  # of the worker that is stopped
        self.num_restarts = 0

    async def stop(self) -> None:
        if self.end is not None:
            raise self.end

    async def process_id(self) -> int:
        return id(self)

    def restart(self) -> None:
        self.num_restarts += 1


class FakeMachines:
    """Has room at once, or never."""

    def __init__(self, processes: dict[str, FakeProcess]) -> None:
        self._processes = processes
        self.has_room = True
        self.num_releases = 0

    async def place(self, group: PlacementGroup) -> Sequence[FakeProcess]:
        if not self.has_room:
            await asyncio.get_running_loop().create_future()
        return [self._processes[worker.worker_id] for worker in group.workers]

    async def release(self) -> None:
        self.num_releases += 1


class FakeMembership:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def add_worker(self, address: str) -> None:
        self.told.append(("add", address))

    async def remove_worker(self, address: str, /) -> None:
        self.told.append(("remove", address))


@pytest.fixture
def membership() -> FakeMembership:
    return FakeMembership()


@pytest.fixture
def processes() -> dict[str, FakeProcess]:
    return {"decode-0": FakeProcess(), "decode-1": FakeProcess()}


@pytest.fixture
def machines(processes: dict[str, FakeProcess]) -> FakeMachines:
    return FakeMachines(processes)


@pytest.fixture
async def new_fleet(
    processes: dict[str, FakeProcess], machines: FakeMachines, membership: FakeMembership
) -> AsyncIterator[Callable[[float], Fleet]]:
    fleets: list[Fleet] = []
    engine = EngineConfig(num_blocks=64, max_model_len=256)
    workers = [PlannedWorker(Role.DECODE, WorkerConfig(engine=engine, worker_id=name)) for name in processes]

    def new(start_timeout_s: float = 600.0) -> Fleet:
        fleets.append(Fleet(workers, membership, machines, start_timeout_s=start_timeout_s))
        return fleets[-1]

    yield new
    for fleet in fleets:
        await fleet.stop(timeout_s=1.0)


@pytest.mark.parametrize("is_seen_dying", [True, False])
async def test_worker_that_dies_while_others_load_is_launched_again_at_once(
    new_fleet: Callable[[], Fleet], processes: dict[str, FakeProcess], membership: FakeMembership, is_seen_dying: bool
) -> None:
    fleet = new_fleet()
    starting = asyncio.create_task(fleet.start())
    dying, loading = processes["decode-0"], processes["decode-1"]
    loads = await loading.start.next()
    (await dying.start.next()).set_result("10.0.0.1:1")
    watched = await dying.wait.next()
    if is_seen_dying:
        watched.set_exception(ProcessLost("killed"))
    else:
        watched.set_result(False)  # Ray's next process answered: it has started no worker
    (await dying.start.next()).set_result("10.0.0.1:2")
    await dying.wait.next()
    assert membership.told == [("add", "10.0.0.1:1"), ("remove", "10.0.0.1:1"), ("add", "10.0.0.1:2")]
    assert fleet.num_restarts == 1
    assert not starting.done()
    loads.set_result("10.0.0.2:1")
    await starting


async def test_worker_that_is_stopped_is_not_launched_again(
    new_fleet: Callable[[], Fleet],
    machines: FakeMachines,
    processes: dict[str, FakeProcess],
    membership: FakeMembership,
) -> None:
    fleet = new_fleet()
    starting = asyncio.create_task(fleet.start())
    for name, process in processes.items():
        (await process.start.next()).set_result(name)
    await starting
    (await processes["decode-0"].wait.next()).set_result(True)
    await fleet.stop(timeout_s=1.0)
    assert membership.told == [("add", "decode-0"), ("add", "decode-1")]
    assert machines.num_releases == 1


async def test_worker_that_hangs_while_it_starts_loses_its_process(
    new_fleet: Callable[[float], Fleet], processes: dict[str, FakeProcess]
) -> None:
    fleet = new_fleet(0.01)
    with pytest.raises(FleetError, match=r"^decode-[01] was not ready after 0.01 s$"):
        await fleet.start()
    assert any(process.num_restarts for process in processes.values())


async def test_launches_that_go_on_when_one_has_failed_end_with_the_fleet(
    new_fleet: Callable[[], Fleet], processes: dict[str, FakeProcess], membership: FakeMembership
) -> None:
    fleet = new_fleet()
    starting = asyncio.create_task(fleet.start())
    late = await processes["decode-1"].start.next()
    (await processes["decode-0"].start.next()).set_exception(ProcessLost("killed"))
    with pytest.raises(FleetError, match=r"^decode-0 died while it started: killed$"):
        await starting
    await fleet.stop(timeout_s=1.0)
    assert late.cancelled()
    assert membership.told == []


async def test_worker_that_raises_while_it_starts_is_named_with_its_words(
    new_fleet: Callable[[], Fleet], processes: dict[str, FakeProcess]
) -> None:
    starting = asyncio.create_task(new_fleet().start())
    (await processes["decode-1"].start.next()).set_exception(WorkerRaised("no such model"))
    with pytest.raises(FleetError, match=r"^decode-1 cannot start: no such model$"):
        await starting


async def test_fleet_without_room_says_what_it_needs(
    new_fleet: Callable[[float], Fleet], machines: FakeMachines
) -> None:
    machines.has_room = False
    with pytest.raises(FleetError, match=r"^the cluster has no room for 2 workers of 1 CPUs each; waited 0.01 s$"):
        await new_fleet(0.01).start()


async def test_what_a_worker_complains_of_at_its_end_is_heard(
    new_fleet: Callable[[], Fleet], processes: dict[str, FakeProcess], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = new_fleet()
    starting = asyncio.create_task(fleet.start())
    for name, process in processes.items():
        (await process.start.next()).set_result(name)
    await starting
    processes["decode-0"].end = WorkerRaised("3 blocks are held by nobody")
    processes["decode-1"].end = ProcessLost("killed")  # which is what was wanted
    with caplog.at_level(logging.ERROR):
        await fleet.stop(timeout_s=1.0)
    assert caplog.messages == ["a worker did not end well: 3 blocks are held by nobody"]


async def test_process_ids_are_by_worker(new_fleet: Callable[[], Fleet], processes: dict[str, FakeProcess]) -> None:
    fleet = new_fleet()
    starting = asyncio.create_task(fleet.start())
    for name, process in processes.items():
        (await process.start.next()).set_result(name)
    await starting
    assert await fleet.process_ids() == {name: id(process) for name, process in processes.items()}

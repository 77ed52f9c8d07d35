"""Who is launched, watched and launched again, and when: with actors that do what a test says, and no Ray."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from cluster.actors import Fleet, FleetError, _ended_in_time, _Member
from cluster.worker_info import Role
from cluster.worker_plan import PlannedWorker
from engine.config import EngineConfig
from worker.config import WorkerConfig


class Call:
    """A method of an actor: each call is answered by the test, in order, before or after it comes."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()

    def remote(self) -> asyncio.Future[Any]:
        call = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(call)
        return call

    async def next(self) -> asyncio.Future[Any]:
        return await self._asked.get()


class FakeActor:
    def __init__(self) -> None:
        self.start, self.wait, self.stop = Call(), Call(), Call()
        self.stop.remote = self._stopped  # type: ignore[method-assign]
        self.kills: list[bool] = []

    @staticmethod
    def _stopped() -> asyncio.Future[Any]:
        call = asyncio.get_running_loop().create_future()
        call.set_result(None)
        return call


class FakeMembership:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def add_worker(self, address: str) -> None:
        self.told.append(("add", address))

    async def remove_worker(self, address: str, /) -> None:
        self.told.append(("remove", address))


class FleetOfFakes(Fleet):
    """One whose workers are placed at once."""

    def __init__(self, actors: dict[str, FakeActor], membership: FakeMembership, start_timeout_s: float) -> None:
        super().__init__([], membership, start_timeout_s=start_timeout_s)
        self._actors = actors

    async def _place(self) -> None:
        engine = EngineConfig(num_blocks=64, max_model_len=256)
        self._members = [
            _Member(PlannedWorker(Role.DECODE, WorkerConfig(engine=engine, worker_id=name, executor="hash")), actor)
            for name, actor in self._actors.items()
        ]


@pytest.fixture
def membership() -> FakeMembership:
    return FakeMembership()


@pytest.fixture
def actors() -> dict[str, FakeActor]:
    return {"decode-0": FakeActor(), "decode-1": FakeActor()}


@pytest.fixture
async def new_fleet(
    actors: dict[str, FakeActor], membership: FakeMembership, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[float], Fleet]]:
    fleets: list[Fleet] = []

    def kill(actor: FakeActor, *, no_restart: bool) -> None:
        actor.kills.append(no_restart)

    def new(start_timeout_s: float = 600.0) -> Fleet:
        fleets.append(FleetOfFakes(actors, membership, start_timeout_s))
        return fleets[-1]

    monkeypatch.setattr("cluster.actors.ray", SimpleNamespace(kill=kill))
    yield new
    for fleet in fleets:
        await fleet.stop(timeout_s=1.0)


@pytest.mark.parametrize("is_seen_dying", [True, False])
async def test_worker_that_dies_while_others_load_is_launched_again_at_once(
    new_fleet: Callable[[], Fleet], actors: dict[str, FakeActor], membership: FakeMembership, is_seen_dying: bool
) -> None:
    fleet = new_fleet()
    starting = asyncio.create_task(fleet.start())
    dying, loading = actors["decode-0"], actors["decode-1"]
    loads = await loading.start.next()
    (await dying.start.next()).set_result("10.0.0.1:1")
    watched = await dying.wait.next()
    if is_seen_dying:
        watched.set_exception(RayActorError())
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
    new_fleet: Callable[[], Fleet], actors: dict[str, FakeActor], membership: FakeMembership
) -> None:
    fleet = new_fleet()
    starting = asyncio.create_task(fleet.start())
    for name, actor in actors.items():
        (await actor.start.next()).set_result(name)
    await starting
    (await actors["decode-0"].wait.next()).set_result(True)
    await fleet.stop(timeout_s=1.0)
    assert membership.told == [("add", "decode-0"), ("add", "decode-1")]
    assert [actor.kills for actor in actors.values()] == [[True], [True]]


async def test_worker_that_hangs_while_it_starts_loses_its_process(
    new_fleet: Callable[[float], Fleet], actors: dict[str, FakeActor]
) -> None:
    fleet = new_fleet(0.0)
    with pytest.raises(FleetError, match=r"^decode-[01] was not ready after 0 s$"):
        await fleet.start()
    assert any(actor.kills == [False] for actor in actors.values())


async def test_launches_that_go_on_when_one_has_failed_end_with_the_fleet(
    new_fleet: Callable[[], Fleet], actors: dict[str, FakeActor], membership: FakeMembership
) -> None:
    fleet = new_fleet()
    starting = asyncio.create_task(fleet.start())
    late = await actors["decode-1"].start.next()
    (await actors["decode-0"].start.next()).set_exception(RayActorError())
    with pytest.raises(FleetError, match=r"^decode-0 died while it started"):
        await starting
    await fleet.stop(timeout_s=1.0)
    assert late.cancelled()
    assert membership.told == []


async def test_call_to_a_ray_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr("cluster.actors._RAY_END_S", 0.0)

    def hang() -> None:
        answered.wait()

    assert not await _ended_in_time(hang)
    answered.set()
    monkeypatch.setattr("cluster.actors._RAY_END_S", 600.0)
    assert await _ended_in_time(lambda: None)

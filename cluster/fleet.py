"""The workers of a cluster: placed, started, watched and brought back.

A worker's life: placed (a process that has loaded nothing) → started (it loads the model, and the gateway is told its
address) → watched (a call that returns only when it ends) → lost (the gateway is told at once) → started again in a new
process, with a new pool, a new instance id and usually another address → … → stopped.

Where processes come from is not known here: from a `Machines`, which is Ray in `actors.py`.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.backoff import Backoff
from cluster.placement import PlacementGroup, place
from cluster.worker_plan import PlannedWorker

logger = logging.getLogger(__name__)


class FleetError(Exception):
    """A worker found no place or did not start; the message is one sentence for the user."""


class ProcessLost(Exception):
    """A worker's process is gone, and has not answered; the message is one line."""


class WorkerRaised(Exception):
    """A worker's process lives, and its answer is an error; the message is that error's, in one line."""


class WorkerProcess(Protocol):
    """The process of one worker; of the next one, as soon as it is lost. All calls raise the two errors above."""

    async def start(self) -> str:
        """Loads and serves; returns the address (host:port)."""
        ...

    async def wait(self) -> bool:
        """Returns True when the worker was stopped; False at once in a process that has started none."""
        ...

    async def stop(self) -> None:
        """Ends the worker, not its process."""
        ...

    async def process_id(self) -> int: ...

    def restart(self) -> None:
        """Ends the process, whatever it does; another takes its place."""
        ...


class Machines(Protocol):
    """Where workers can be placed."""

    async def place(self, group: PlacementGroup) -> Sequence[WorkerProcess]:
        """A process for each of `group.workers`, as soon as there is room for all."""
        ...

    async def release(self) -> None:
        """Ends all processes by force, and gives up their places. Idempotent."""
        ...


class Membership(Protocol):
    """Who is told which workers there are: the gateway's."""

    def add_worker(self, address: str) -> object: ...
    async def remove_worker(self, address: str, /) -> None: ...


@dataclass(slots=True)
class _Member:
    """A worker of the fleet, over all its starts."""

    worker_id: str
    process: WorkerProcess
    address: str | None = None  # None: not serving
    num_restarts: int = 0


class Fleet:
    """N prefill and M decode workers, kept alive from `start` to `stop`.

    Args:
        membership: told of each worker that serves, and of each that no longer does.
        start_timeout_s: for a worker to be placed, and then to load the model.
    """

    def __init__(
        self,
        workers: Sequence[PlannedWorker],
        membership: Membership,
        machines: Machines,
        *,
        start_timeout_s: float = 600.0,
    ) -> None:
        self._workers = workers
        self._membership = membership
        self._machines = machines
        self._start_timeout_s = start_timeout_s
        self._members: list[_Member] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_restarts(self) -> int:
        """How often a worker was lost and started again."""
        return sum(member.num_restarts for member in self._members)

    async def process_ids(self) -> dict[str, int]:
        """By worker id; of workers that are being started again, when they are."""
        ids = await asyncio.gather(*(member.process.process_id() for member in self._members))
        return {member.worker_id: pid for member, pid in zip(self._members, ids, strict=True)}

    async def start(self) -> None:
        """Returns when every worker serves; they start side by side.

        Raises:
            FleetError: one did not, or found no place. `stop` cleans up.
        """
        for group in place(self._workers):
            await self._place(group)
        launches = [asyncio.create_task(self._launch_and_watch(member)) for member in self._members]
        self._tasks += launches
        await asyncio.gather(*launches)

    async def stop(self, timeout_s: float) -> None:
        """Ends all workers, by force after `timeout_s`. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        stops = [asyncio.ensure_future(m.process.stop()) for m in self._members if m.address is not None]
        if stops:
            _, late = await asyncio.wait(stops, timeout=timeout_s)
            for stop in late:
                stop.cancel()
            for end in await asyncio.gather(*stops, return_exceptions=True):
                # Whoever is late, or dead already, is ended with the rest; what a worker complains of is to be heard.
                if isinstance(end, WorkerRaised):
                    logger.error("a worker did not end well: %s", end)
        self._members.clear()
        await self._machines.release()

    async def _place(self, group: PlacementGroup) -> None:
        try:
            processes = await asyncio.wait_for(self._machines.place(group), self._start_timeout_s)
        except TimeoutError as exc:
            raise FleetError(f"the cluster has no room for {group}; waited {self._start_timeout_s:g} s") from exc
        self._members += [
            _Member(worker.worker_id, process) for worker, process in zip(group.workers, processes, strict=True)
        ]

    async def _launch_and_watch(self, member: _Member) -> None:
        """Watched from its first moment: it may die while others still load."""
        await self._launch(member)
        watcher = asyncio.create_task(self._watch(member), name=f"watch {member.worker_id}")
        watcher.add_done_callback(_report_end)
        self._tasks.append(watcher)

    async def _launch(self, member: _Member) -> None:
        worker_id = member.worker_id
        try:
            address = await asyncio.wait_for(member.process.start(), self._start_timeout_s)
        except TimeoutError as exc:
            # What hangs goes with its process: another try must not meet it.
            member.process.restart()
            raise FleetError(f"{worker_id} was not ready after {self._start_timeout_s:g} s") from exc
        except WorkerRaised as exc:
            raise FleetError(f"{worker_id} cannot start: {exc}") from exc
        except ProcessLost as exc:
            raise FleetError(f"{worker_id} died while it started: {exc}") from exc
        member.address = address
        self._membership.add_worker(address)

    async def _watch(self, member: _Member) -> None:
        """Brings one worker back whenever it is lost."""
        worker_id = member.worker_id
        backoff = Backoff(first_s=0.2, max_s=30.0)
        while True:
            try:
                if await member.process.wait():
                    return  # stopped
            except ProcessLost as exc:
                logger.debug("%s: %s", worker_id, exc)
            if member.address is not None:
                await self._membership.remove_worker(member.address)
                member.address = None
            logger.warning("%s has died and is started again", worker_id)
            while member.address is None:
                try:
                    await self._launch(member)
                except FleetError as exc:
                    delay_s = backoff.next_delay()
                    logger.warning("%s; the next try is in %.1f s", exc, delay_s)
                    await asyncio.sleep(delay_s)
            member.num_restarts += 1
            backoff.succeeded()
            logger.warning("%s serves again, at %s", worker_id, member.address)


def _report_end(watcher: asyncio.Task[None]) -> None:
    if not watcher.cancelled() and (exc := watcher.exception()) is not None:
        logger.error("the %s has ended: workers that die now stay dead", watcher.get_name(), exc_info=exc)

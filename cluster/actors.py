"""Ray: it places workers, starts and watches them, and brings them back. The only file that names it.

A worker's life: placed (a bundle of a placement group) → started (its process loads the model, and the gateway is told
its address) → watched (a call that returns only when it ends) → lost (the gateway is told at once) → started again by
Ray as a new process, with a new pool, a new instance id and usually another address → … → stopped.

Ray carries no token and no block: it knows which processes there are to be, and that is all.
"""

import asyncio
import atexit
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup as RayPlacementGroup
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.backoff import Backoff
from cluster.worker_info import Role
from cluster.worker_plan import Bundle, PlannedWorker, place

logger = logging.getLogger(__name__)

# Ray's least; nothing of ours goes through its object store.
_OBJECT_STORE_BYTES = 80 << 20
_REACH_S = 10.0
# For what Ray does at the end. A SIGTERM to all processes of a service (from systemd, `timeout`, a shell) ends its
# daemons as well, and without them it would try to reach them for a minute.
_RAY_END_S = 2.0


class FleetError(Exception):
    """Ray or a worker did not start; the message is one sentence for the user."""


class Membership(Protocol):
    """Who is told which workers there are: the gateway's."""

    def add_worker(self, address: str) -> object: ...
    async def remove_worker(self, address: str, /) -> None: ...


class Worker(Protocol):
    """What an actor runs: a prefill or a decode worker."""

    async def start(self) -> str: ...
    async def stop(self) -> None: ...
    async def wait(self) -> None: ...


def connect(address: str, num_cpus: int) -> None:
    """Starts a Ray on this machine ("local"), or joins the one at `address`; takes seconds.

    Args:
        num_cpus: logical ones, for a local Ray: as many as the workers ask for, whatever the machine has.

    Raises:
        FleetError: it did not start, or nobody is there.
    """
    options: dict[str, Any] = {"address": address, "logging_level": logging.ERROR, "log_to_driver": True}
    if address == "local":
        options |= {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        # Ray would report about the machine to its makers.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    else:
        _require_reachable(address)
    try:
        ray.init(**options)
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as exc:
        if address == "local":
            raise FleetError(f"Ray did not start: {_first_line(exc)}") from exc
        if isinstance(exc.__cause__, RuntimeError) and "AuthenticationError" in str(exc.__cause__):
            raise FleetError(
                f"the Ray cluster at {address!r} does not take our token: "
                "set RAY_AUTH_MODE=token, and have its ~/.ray/auth_token here"
            ) from exc
        raise FleetError(f"the Ray cluster at {address!r} cannot be joined: {_first_line(exc)}") from exc


def _require_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        return  # "auto": Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as exc:
        raise FleetError(f"nothing answers at the Ray address {address!r}") from exc


async def disconnect() -> None:
    """Leaves Ray; a local one ends with all its processes. Idempotent."""
    if not await _ended_in_time(ray.shutdown):
        # Nor shall it try once more when the interpreter ends. What is left of a local Ray is ended then nevertheless,
        # by a handler of its own; and workers end without their daemon.
        atexit.unregister(ray.shutdown)


async def _ended_in_time(call: Callable[[], None]) -> bool:
    """Whether a call to Ray has come back; one that hangs is left to a thread that nobody waits for."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            call()
        except RayError as exc:
            logger.debug("Ray at its end: %s", exc)
        finally:
            with suppress(RuntimeError):  # the loop is closed: too late
                loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=run, name="end of Ray", daemon=True).start()
    try:
        await asyncio.wait_for(ended.wait(), _RAY_END_S)
    except TimeoutError:
        logger.info("Ray does not answer: it is left as it is")
        return False
    return True


class WorkerActor:
    """One worker in a process of its own. Light at birth: Ray makes it anew after a death; `start` loads the model."""

    def __init__(self, planned: PlannedWorker, *, on_node_address: bool, log_level: str) -> None:
        logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
        # gRPC's own lines on every connection that ends; before it is imported.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        self._planned = planned
        self._on_node_address = on_node_address
        self._worker: Worker | None = None
        self._is_stopping = False

    def __repr__(self) -> str:
        # Ray puts it before each line that the worker prints.
        return self._planned.worker_id

    async def start(self) -> str:
        """Loads the model and serves; returns the address. Again after a failure, if need be."""
        assert self._worker is None, f"{self} has been started already"
        config = self._planned.config
        if self._on_node_address:
            config = replace(config, host=ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        worker = _make_worker(replace(self._planned, config=config))
        address = await worker.start()
        self._worker = worker
        return address

    async def wait(self) -> bool:
        """Returns True after `stop`; False at once in a process that has started no worker.

        A call that comes just after a death finds such a process: Ray's next. A worker that ends by itself takes the
        process along, so that Ray makes another, as after a crash.
        """
        if self._worker is None:
            return False
        try:
            await self._worker.wait()
        except Exception:
            logger.exception("the worker has failed")
        if not self._is_stopping:
            logger.error("the worker has ended by itself")
            os._exit(1)
        return True

    async def process_id(self) -> int:
        """Of the process that this start runs in."""
        return os.getpid()

    async def stop(self) -> None:
        """Ends the worker; its process stays."""
        self._is_stopping = True
        if self._worker is not None:
            await self._worker.stop()


def _make_worker(planned: PlannedWorker) -> Worker:
    # Imported here, in the worker's process: the gateway's never sees torch.
    match planned.role:
        case Role.PREFILL:
            from prefill_worker import PrefillWorker

            return PrefillWorker(planned.config)
        case Role.DECODE:
            from decode_worker import DecodeWorker

            return DecodeWorker(planned.config)


@dataclass(slots=True)
class _Member:
    """A worker of the fleet, over all its starts."""

    planned: PlannedWorker
    actor: Any  # a handle of Ray's, which has no static type
    address: str | None = None  # None: not serving
    num_restarts: int = 0


class Fleet:
    """N prefill and M decode workers, kept alive from `start` to `stop`.

    Args:
        membership: told of each worker that serves, and of each that no longer does.
        on_node_address: workers listen on their machine's address, for a cluster of several; else on their config's.
        start_timeout_s: for a worker to be placed, and then to load the model.
    """

    def __init__(
        self,
        workers: Sequence[PlannedWorker],
        membership: Membership,
        *,
        on_node_address: bool = False,
        start_timeout_s: float = 600.0,
        gpus_per_worker: int = 0,
        log_level: str = "warning",
    ) -> None:
        self._workers = workers
        self._membership = membership
        self._on_node_address = on_node_address
        self._start_timeout_s = start_timeout_s
        self._gpus_per_worker = gpus_per_worker
        self._log_level = log_level
        self._members: list[_Member] = []
        self._groups: list[RayPlacementGroup] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_restarts(self) -> int:
        """How often a worker was lost and started again."""
        return sum(member.num_restarts for member in self._members)

    async def process_ids(self) -> dict[str, int]:
        """By worker id; of workers that are being started again, when they are."""
        ids = await asyncio.gather(*(_result(member.actor.process_id.remote()) for member in self._members))
        return {member.planned.worker_id: pid for member, pid in zip(self._members, ids, strict=True)}

    async def start(self) -> None:
        """Returns when every worker serves; they start side by side.

        Raises:
            FleetError: one did not, or found no place. `stop` cleans up.
        """
        await self._place()
        launches = [asyncio.create_task(self._launch_and_watch(member)) for member in self._members]
        self._tasks += launches
        await asyncio.gather(*launches)

    async def stop(self, timeout_s: float) -> None:
        """Ends all workers, by force after `timeout_s`. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        stops = [asyncio.ensure_future(_result(m.actor.stop.remote())) for m in self._members if m.address is not None]
        if stops:
            _, late = await asyncio.wait(stops, timeout=timeout_s)
            for stop in late:
                stop.cancel()
            for end in await asyncio.gather(*stops, return_exceptions=True):
                # Whoever is late, or dead already, is killed with the rest; what a worker complains of is to be heard.
                if isinstance(end, RayTaskError):
                    logger.error("a worker did not end well: %s", _first_line(end.cause))
        members, groups = tuple(self._members), tuple(self._groups)
        self._members.clear()
        self._groups.clear()

        def release() -> None:
            for member in members:
                ray.kill(member.actor, no_restart=True)
            for group in groups:
                remove_placement_group(group)

        if members or groups:
            await _ended_in_time(release)

    async def _place(self) -> None:
        for planned_group in place(self._workers, self._gpus_per_worker):
            group = placement_group([_resources(b) for b in planned_group.bundles], strategy=planned_group.strategy)
            self._groups.append(group)
            try:
                await asyncio.wait_for(_result(group.ready()), self._start_timeout_s)
            except TimeoutError as exc:
                bundles = planned_group.bundles
                together = " on one machine" if planned_group.strategy == "STRICT_PACK" else ""
                raise FleetError(
                    f"the Ray cluster has no room for {len(bundles)} workers of {bundles[0].num_cpus} CPUs "
                    f"and {bundles[0].num_gpus} GPUs each{together}; waited {self._start_timeout_s:g} s"
                ) from exc
            self._members += [
                _Member(bundle.worker, self._new_actor(bundle, group, index))
                for index, bundle in enumerate(planned_group.bundles)
            ]

    def _new_actor(self, bundle: Bundle, group: RayPlacementGroup, index: int) -> Any:
        options = ray.remote(WorkerActor).options(
            num_cpus=bundle.num_cpus,
            num_gpus=bundle.num_gpus,
            # A call is never repeated: a restart means another pool, and whoever called must know.
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        return options.remote(bundle.worker, on_node_address=self._on_node_address, log_level=self._log_level)

    async def _launch_and_watch(self, member: _Member) -> None:
        """Watched from its first moment: it may die while others still load."""
        await self._launch(member)
        watcher = asyncio.create_task(self._watch(member), name=f"watch {member.planned.worker_id}")
        watcher.add_done_callback(_report_end)
        self._tasks.append(watcher)

    async def _launch(self, member: _Member) -> None:
        worker_id = member.planned.worker_id
        try:
            address = await asyncio.wait_for(_result(member.actor.start.remote()), self._start_timeout_s)
        except TimeoutError as exc:
            # What hangs goes with its process: another try must not meet it.
            ray.kill(member.actor, no_restart=False)
            raise FleetError(f"{worker_id} was not ready after {self._start_timeout_s:g} s") from exc
        except RayTaskError as exc:
            raise FleetError(f"{worker_id} cannot start: {_first_line(exc.cause)}") from exc
        except RayActorError as exc:
            raise FleetError(f"{worker_id} died while it started: {_first_line(exc)}") from exc
        member.address = address
        self._membership.add_worker(address)

    async def _watch(self, member: _Member) -> None:
        """Brings one worker back whenever it is lost."""
        worker_id = member.planned.worker_id
        backoff = Backoff(first_s=0.2, max_s=30.0)
        while True:
            try:
                if await _result(member.actor.wait.remote()):
                    return  # stopped
            except RayActorError as exc:
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


def _resources(bundle: Bundle) -> dict[str, float]:
    gpus = {"GPU": float(bundle.num_gpus)} if bundle.num_gpus else {}
    return {"CPU": float(bundle.num_cpus), **gpus}


async def _result(ref: Any) -> Any:
    return await ref


def _report_end(watcher: asyncio.Task[None]) -> None:
    if not watcher.cancelled() and (exc := watcher.exception()) is not None:
        logger.error("the %s has ended: workers that die now stay dead", watcher.get_name(), exc_info=exc)


def _first_line(exc: BaseException) -> str:
    """What happened in one line; Ray's own messages go on for a page."""
    lines = str(exc).strip().splitlines()
    said = lines[0] if lines else ""
    # These are raised with sentences; of others (KeyError: 'x') the name says more than the text.
    if said and (isinstance(exc, (ValueError, OSError)) or type(exc).__module__ != "builtins"):
        return said
    return f"{type(exc).__name__}: {said}"

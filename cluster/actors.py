"""Ray: it finds room for workers, gives each a process, and another when that dies. The only file that names it.

Ray carries no token and no block: it knows which processes there are to be, and that is all. What is done with them is
in `fleet.py`.
"""

import asyncio
import atexit
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup as RayPlacementGroup
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.fleet import FleetError, ProcessLost, WorkerRaised
from cluster.placement import Bundle, PlacementGroup, own_cuda_device
from cluster.worker_info import Role
from cluster.worker_plan import PlannedWorker
from worker.heap import settle_heap
from worker.log import configure_logging

logger = logging.getLogger(__name__)

# Ray's least; nothing of ours goes through its object store.
_OBJECT_STORE_BYTES = 80 << 20
_REACH_S = 10.0
# For what Ray does at the end. A SIGTERM to all processes of a service (from systemd, `timeout`, a shell) ends its
# daemons as well, and without them it would try to reach them for a minute.
_RAY_END_S = 2.0


class Worker(Protocol):
    """What an actor runs: a prefill or a decode worker."""

    async def start(self) -> str: ...
    async def stop(self) -> None: ...
    async def wait(self) -> None: ...


def connect(address: str, num_cpus: int) -> None:
    """Starts a Ray on this machine ("local"), or joins the one at `address`; takes seconds.

    Args:
        num_cpus: logical ones, for a local Ray: as many as the workers ask for, whatever the machine has. Its GPUs it
            counts itself.

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

    def __init__(self, planned: PlannedWorker, *, on_node_address: bool) -> None:
        config = planned.config
        configure_logging(config.log_level, config.log_format, worker_id=config.worker_id)
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
        if config.device == "cuda":
            (gpu_id,) = ray.get_gpu_ids()
            config = replace(config, device=own_cuda_device(gpu_id, os.environ.get("CUDA_VISIBLE_DEVICES")))
        if self._on_node_address:
            config = replace(config, host=ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        worker = _make_worker(replace(self._planned, config=config))
        address = await worker.start()
        settle_heap()
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


class RayMachines:
    """The machines of a Ray cluster (a `fleet.Machines`).

    Args:
        on_node_address: workers listen on their machine's address, for a cluster of several; else on their config's.
    """

    def __init__(self, *, on_node_address: bool = False) -> None:
        self._on_node_address = on_node_address
        self._groups: list[RayPlacementGroup] = []
        self._processes: list[RayProcess] = []

    async def place(self, group: PlacementGroup) -> list["RayProcess"]:
        placed = placement_group([_resources(bundle) for bundle in group.bundles], strategy=group.strategy)
        self._groups.append(placed)
        await _result(placed.ready())
        processes = [
            RayProcess(self._new_actor(worker, placed, index))
            for index, bundle in enumerate(group.bundles)
            for worker in bundle.workers
        ]
        self._processes += processes
        return processes

    async def release(self) -> None:
        processes, groups = tuple(self._processes), tuple(self._groups)
        self._processes.clear()
        self._groups.clear()

        def release() -> None:
            for process in processes:
                ray.kill(process.actor, no_restart=True)
            for group in groups:
                remove_placement_group(group)

        if groups:
            await _ended_in_time(release)

    def _new_actor(self, worker: PlannedWorker, group: RayPlacementGroup, bundle_index: int) -> Any:
        options = ray.remote(WorkerActor).options(
            num_cpus=worker.num_cpus,
            num_gpus=worker.num_gpus,
            # A call is never repeated: a restart means another pool, and whoever called must know.
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle_index),
        )
        return options.remote(worker, on_node_address=self._on_node_address)


class RayProcess:
    """The process of an actor (a `fleet.WorkerProcess`): Ray makes another when it dies.

    Args:
        actor: a handle of Ray's, which has no static type.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def start(self) -> str:
        address: str = await _result(self.actor.start.remote())
        return address

    async def wait(self) -> bool:
        was_stopped: bool = await _result(self.actor.wait.remote())
        return was_stopped

    async def stop(self) -> None:
        await _result(self.actor.stop.remote())

    async def process_id(self) -> int:
        process_id: int = await _result(self.actor.process_id.remote())
        return process_id

    def restart(self) -> None:
        ray.kill(self.actor, no_restart=False)


def _resources(bundle: Bundle) -> dict[str, float]:
    gpus = {"GPU": bundle.num_gpus} if bundle.num_gpus else {}
    return {"CPU": float(bundle.num_cpus), **gpus}


async def _result(ref: Any) -> Any:
    """What a call to Ray comes to, its errors made the fleet's."""
    try:
        return await ref
    except RayTaskError as exc:
        raise WorkerRaised(_first_line(exc.cause)) from exc
    except RayActorError as exc:
        raise ProcessLost(_first_line(exc)) from exc


def _first_line(exc: BaseException) -> str:
    """What happened in one line; Ray's own messages go on for a page."""
    lines = str(exc).strip().splitlines()
    said = lines[0] if lines else ""
    # These are raised with sentences; of others (KeyError: 'x') the name says more than the text.
    if said and (isinstance(exc, (ValueError, OSError)) or type(exc).__module__ != "builtins"):
        return said
    return f"{type(exc).__name__}: {said}"

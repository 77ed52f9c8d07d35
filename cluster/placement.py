"""Who must be near whom: workers that hand blocks to each other are on one machine.

A block goes from pool to pool by memory that both processes map: shared memory, or a GPU's own. Neither reaches another
machine. So workers are placed in groups, each of them whole on one machine, or not at all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from cluster.worker_info import Role
from cluster.worker_plan import PlannedWorker


@dataclass(frozen=True, slots=True)
class Bundle:
    """Room on one machine: for one worker, or for two that share a GPU."""

    workers: tuple[PlannedWorker, ...]

    @property
    def num_cpus(self) -> int:
        return sum(worker.num_cpus for worker in self.workers)

    @property
    def num_gpus(self) -> float:
        return sum(worker.num_gpus for worker in self.workers)


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """Workers that are placed together or not at all. The strategy is Ray's word."""

    strategy: str  # STRICT_PACK: one machine; PACK: few; SPREAD: many
    bundles: tuple[Bundle, ...]

    @property
    def workers(self) -> tuple[PlannedWorker, ...]:
        return tuple(worker for bundle in self.bundles for worker in bundle.workers)

    def __str__(self) -> str:
        """What it asks for, in words."""
        each = self.workers[0]
        gpus = f" and {each.num_gpus:g} GPUs" if each.num_gpus else ""
        together = " on one machine" if self.strategy == "STRICT_PACK" else ""
        return f"{len(self.workers)} workers of {each.num_cpus} CPUs{gpus} each{together}"


def place(workers: Sequence[PlannedWorker]) -> list[PlacementGroup]:
    """The groups of a cluster's workers.

    On CPUs all are one group: any decode worker may be handed a prompt by any prefill worker. With GPUs there are as
    many groups as each can have one worker of both roles, so that nobody is without a partner; the others join them in
    turn, and the machine of a group has to hold it whole. Decode workers without prefill workers hand nothing over and
    may be anywhere: on GPUs they are spread.
    """
    prefill = [worker for worker in workers if worker.role is Role.PREFILL]
    decode = [worker for worker in workers if worker.role is Role.DECODE]
    has_gpus = any(worker.num_gpus for worker in workers)
    if not prefill:
        return [PlacementGroup("SPREAD" if has_gpus else "PACK", _bundles(prefill, decode))]
    num_groups = min(len(prefill), len(decode)) if has_gpus else 1
    return [
        PlacementGroup("STRICT_PACK", _bundles(prefill[i::num_groups], decode[i::num_groups]))
        for i in range(num_groups)
    ]


def _bundles(prefill: Sequence[PlannedWorker], decode: Sequence[PlannedWorker]) -> tuple[Bundle, ...]:
    """A bundle a worker; or for two with half a GPU each, of both roles as long as there are such."""
    if not any(worker.num_gpus == 0.5 for worker in (*prefill, *decode)):
        return tuple(Bundle((worker,)) for worker in (*prefill, *decode))
    in_turn = list(_alternating(prefill, decode))
    return tuple(Bundle(tuple(in_turn[i : i + 2])) for i in range(0, len(in_turn), 2))


def _alternating(prefill: Sequence[PlannedWorker], decode: Sequence[PlannedWorker]) -> Iterator[PlannedWorker]:
    for pair in zip_longest(prefill, decode):
        yield from filter(None, pair)


def own_cuda_device(gpu_id: int | str, visible_devices: str | None) -> str:
    """The name under which a process knows the GPU that it was given, "cuda:<number>".

    Args:
        gpu_id: of the machine, as whoever placed the process counts or calls it.
        visible_devices: the process's CUDA_VISIBLE_DEVICES, in the order of which CUDA counts; None: it is not set. It
            holds the process's own GPU alone, unless Ray was told to leave it as it is.

    Raises:
        ValueError: the process does not see its GPU.
    """
    if visible_devices is None:
        return f"cuda:{int(gpu_id)}"
    visible = [name.strip() for name in visible_devices.split(",")]
    if str(gpu_id) not in visible:
        raise ValueError(f"GPU {gpu_id} is this worker's, but CUDA_VISIBLE_DEVICES is {visible_devices!r}")
    return f"cuda:{visible.index(str(gpu_id))}"

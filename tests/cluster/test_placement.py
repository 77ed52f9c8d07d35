"""Which workers are placed together, and in what order they ask for GPUs."""

from itertools import product

import pytest

from cluster.placement import own_cuda_device, place
from cluster.worker_info import Role
from cluster.worker_plan import PlannedWorker
from engine.config import EngineConfig
from worker.config import WorkerConfig


def planned(prefill: int, decode: int, num_gpus: float = 0.0) -> list[PlannedWorker]:
    engine = EngineConfig(num_blocks=64, max_model_len=256)
    return [
        PlannedWorker(role, WorkerConfig(engine=engine, worker_id=f"{role.value[0]}{i}", threads=2), num_gpus)
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
        for i in range(count)
    ]


def placed(prefill: int, decode: int, num_gpus: float = 0.0) -> list[str]:
    """A line a group: its strategy, and its bundles with their GPUs."""
    return [
        " ".join(
            [group.strategy] + [f"{'+'.join(w.worker_id for w in b.workers)}:{b.num_gpus:g}" for b in group.bundles]
        )
        for group in place(planned(prefill, decode, num_gpus))
    ]


def test_workers_on_cpus_share_one_machine() -> None:
    assert placed(1, 2) == ["STRICT_PACK p0:0 d0:0 d1:0"]
    (group,) = place(planned(1, 1))
    assert [b.num_cpus for b in group.bundles] == [2, 2]


def test_decode_workers_that_no_one_hands_blocks_to_may_spread_and_on_gpus_they_do() -> None:
    assert placed(0, 2) == ["PACK d0:0 d1:0"]
    assert placed(0, 2, 1) == ["SPREAD d0:1 d1:1"]
    assert placed(0, 3, 0.5) == ["SPREAD d0+d1:1 d2:0.5"]


@pytest.mark.parametrize(
    ("prefill", "decode", "groups"),
    [
        (1, 1, ["p0:1 d0:1"]),
        (2, 2, ["p0:1 d0:1", "p1:1 d1:1"]),
        (3, 2, ["p0:1 p2:1 d0:1", "p1:1 d1:1"]),
        (1, 3, ["p0:1 d0:1 d1:1 d2:1"]),
        (2, 5, ["p0:1 d0:1 d2:1 d4:1", "p1:1 d1:1 d3:1"]),
    ],
)
def test_workers_with_a_gpu_each_are_in_groups_of_both_roles(prefill: int, decode: int, groups: list[str]) -> None:
    assert placed(prefill, decode, 1) == [f"STRICT_PACK {group}" for group in groups]


@pytest.mark.parametrize(
    ("prefill", "decode", "groups"),
    [
        (1, 1, ["p0+d0:1"]),
        (2, 2, ["p0+d0:1", "p1+d1:1"]),
        (3, 2, ["p0+d0:1 p2:0.5", "p1+d1:1"]),
        (1, 4, ["p0+d0:1 d1+d2:1 d3:0.5"]),
    ],
)
def test_workers_with_half_a_gpu_share_one_with_the_other_role_if_they_can(
    prefill: int, decode: int, groups: list[str]
) -> None:
    assert placed(prefill, decode, 0.5) == [f"STRICT_PACK {group}" for group in groups]


@pytest.mark.parametrize("num_gpus", [0.0, 0.5, 1.0])
def test_every_worker_is_placed_once_with_a_partner_and_all_that_it_asks_for(num_gpus: float) -> None:
    for prefill, decode in product(range(5), range(1, 5)):
        workers = planned(prefill, decode, num_gpus)
        groups = place(workers)
        assert sorted(w.worker_id for group in groups for w in group.workers) == sorted(w.worker_id for w in workers)
        for group in groups:
            roles = {worker.role for worker in group.workers}
            assert roles == ({Role.PREFILL, Role.DECODE} if prefill else {Role.DECODE})
            assert sum(b.num_cpus for b in group.bundles) == 2 * len(group.workers)
            assert sum(b.num_gpus for b in group.bundles) == num_gpus * len(group.workers)
            # Not more than a GPU, or sharing would mean nothing.
            assert all(b.num_gpus <= 1 for b in group.bundles)


def test_group_says_what_room_it_needs() -> None:
    assert str(place(planned(1, 1))[0]) == "2 workers of 2 CPUs each on one machine"
    assert str(place(planned(1, 1, 0.5))[0]) == "2 workers of 2 CPUs and 0.5 GPUs each on one machine"
    assert str(place(planned(0, 3, 1))[0]) == "3 workers of 2 CPUs and 1 GPUs each"


@pytest.mark.parametrize(
    ("gpu_id", "visible_devices", "device"),
    [
        (3, "3", "cuda:0"),  # masked by Ray: it sees its own alone
        ("3", "3", "cuda:0"),
        (3, "0,1,2,3", "cuda:3"),  # left as it is
        ("5", "4, 5", "cuda:1"),  # counted from the first that is seen
        ("GPU-b", "GPU-a,GPU-b", "cuda:1"),
        (2, None, "cuda:2"),
    ],
)
def test_process_counts_its_gpu_among_those_that_it_sees(
    gpu_id: int | str, visible_devices: str | None, device: str
) -> None:
    assert own_cuda_device(gpu_id, visible_devices) == device


def test_process_that_does_not_see_its_gpu_says_so() -> None:
    with pytest.raises(ValueError, match=r"GPU 3 is this worker's, but CUDA_VISIBLE_DEVICES is '0,1'"):
        own_cuda_device(3, "0,1")

"""Where Ray puts workers with GPUs: on a cluster of machines with fake ones."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("place_on_fake_gpus.py")
ROOT = SCRIPT.parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """By case and worker: the machine's id, the GPUs that Ray gave, and those that the process sees."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")]),
    }
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_pair_lands_on_the_one_machine_that_has_two_gpus(report: dict[str, Any]) -> None:
    prefill, decode = (report["pair"][name] for name in ("prefill-0", "decode-0"))
    assert prefill["node"] == decode["node"]
    assert prefill["gpus"] != decode["gpus"]
    # Ray masks what a process sees.
    assert [[str(gpu) for gpu in one["gpus"]] for one in (prefill, decode)] == [
        [prefill["visible"]],
        [decode["visible"]],
    ]


def test_pair_is_not_torn_apart_for_want_of_a_machine(report: dict[str, Any]) -> None:
    assert report["no room"] == (
        "the cluster has no room for 2 workers of 1 CPUs and 1 GPUs each on one machine; waited 1 s"
    )


def test_workers_with_half_a_gpu_share_one(report: dict[str, Any]) -> None:
    gpu_of = {name: (one["node"], tuple(one["gpus"])) for name, one in report["shared"].items()}
    assert gpu_of["prefill-0"] == gpu_of["decode-0"]
    assert gpu_of["prefill-1"] == gpu_of["decode-1"]
    assert gpu_of["prefill-0"] != gpu_of["prefill-1"]
    assert all(len(gpus) == 1 for _, gpus in gpu_of.values())


def test_decode_workers_alone_are_spread(report: dict[str, Any]) -> None:
    assert len({one["node"] for one in report["spread"].values()}) == 3

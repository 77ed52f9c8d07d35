"""`tandem doctor`, and what `tandem serve` makes of it."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from cluster.cli.app import app
from engine.cuda.machine import CudaDevice, Machine

NO_CARD = Machine()
ONE_GPU = Machine(
    num_cards=1,
    driver="570.124.06",
    driver_cuda=(12, 8),
    gpus=(CudaDevice("NVIDIA [H200]", (9, 0)),),
    torch="2.10.0",
    torch_cuda=(12, 8),
    cupys=("cupy-cuda12x",),
    why_not_flashinfer="the package flashinfer-python is not installed",
    triton="3.6.0",
)
NO_DRIVER = Machine(num_cards=1, torch="2.10.0", torch_cuda=(12, 8), cupys=("cupy-cuda12x",), triton="3.6.0")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], None]:
    """Puts the commands on a machine."""

    def put(machine: Machine) -> None:
        monkeypatch.setattr("cluster.cli.doctor.look", lambda: machine)
        monkeypatch.setattr("engine.cuda.doctor.look", lambda: machine)

    return put


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, args, env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.mark.parametrize(("machine", "status"), [(NO_CARD, 0), (ONE_GPU, 0), (NO_DRIVER, 1)])
def test_status_is_1_only_if_a_gpu_cannot_be_used(on: Callable[[Machine], None], machine: Machine, status: int) -> None:
    on(machine)
    assert run("doctor")[0] == run("doctor", "--json")[0] == status


def test_each_finding_is_a_line_and_warnings_are_named(on: Callable[[Machine], None]) -> None:
    on(ONE_GPU)
    lines = [line.strip().split(maxsplit=1) for line in run("doctor")[1].splitlines()]
    assert ["ok", "GPU 0: NVIDIA [H200], compute capability 9.0"] in lines
    assert ["warning", "the package flashinfer-python is not installed: attention runs on Triton"] in lines


def test_programs_are_told_the_same(on: Callable[[Machine], None]) -> None:
    on(NO_CARD)
    assert json.loads(run("doctor", "--json")[1]) == [
        {"level": "ok", "sentence": "this machine has no GPU: Tandem runs on its CPU"}
    ]


def test_serving_on_gpus_that_are_not_there_is_refused_at_once(
    on: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("cluster.cli.serve._serve", lambda *_: pytest.fail("a cluster was started"))
    on(NO_CARD)
    assert run("serve", "--device", "cuda") == (1, "tandem: device is cuda, and this machine has no NVIDIA GPU\n")
    on(NO_DRIVER)
    assert "tandem: there is an NVIDIA card but no driver" in run("serve", "--device", "cuda")[1]
    on(ONE_GPU)
    assert run("serve", "--device", "cuda") == (
        1,
        (
            "tandem: 2 workers with 1 GPU each need 2 GPUs (or --gpus-per-worker 0.5, so that two share one), "
            "and this machine has 1\n"
        ),
    )
    assert run("serve", "--device", "cuda", "--gpus-per-worker", "0.5", "--decode-workers", "2") == (
        1,
        "tandem: 3 workers with 0.5 GPU each need 2 GPUs, and this machine has 1\n",
    )


def test_doctor_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from cluster.cli.app import app\n"
        "try: app(['doctor'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'cupy', 'triton', 'flashinfer', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"

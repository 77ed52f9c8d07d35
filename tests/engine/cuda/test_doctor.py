"""What is said of a machine, out of facts."""

from dataclasses import replace

import pytest

from engine.cuda.doctor import Finding, Level, findings, require_cuda
from engine.cuda.machine import CudaDevice, Machine

H200 = CudaDevice("NVIDIA H200", (9, 0))
GOOD = Machine(
    num_cards=1,
    driver="570.124.06",
    driver_cuda=(12, 8),
    gpus=(H200,),
    torch="2.10.0",
    torch_cuda=(12, 8),
    cupys=("cupy-cuda12x",),
    flashinfer="0.7.4",
    triton="3.6.0",
)
NO_NVCC = "FlashInfer compiles its kernels at first use, and nvcc cannot be found"
CPU = Machine(torch="2.13.0+cpu", cupys=("cupy-cuda12x", "cupy-cuda13x"))  # nobody asks for it there


def said(machine: Machine, level: Level) -> list[str]:
    return [finding.sentence for finding in findings(machine) if finding.level is level]


def test_machine_without_a_gpu_is_told_so_calmly() -> None:
    assert findings(CPU) == [Finding(Level.OK, "this machine has no GPU: Tandem runs on its CPU")]


def test_worker_on_cuda_is_refused_on_a_machine_without_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"^device is cuda, and this machine has no NVIDIA GPU$"):
        require_cuda(CPU)


def test_machine_that_lacks_nothing_is_described() -> None:
    assert require_cuda(GOOD) is GOOD
    assert {finding.level for finding in findings(GOOD)} == {Level.OK}
    assert [finding.sentence for finding in findings(GOOD)] == [
        "driver 570.124.06, for CUDA up to 12.8",
        "GPU 0: NVIDIA H200, compute capability 9.0",
        "torch 2.10.0 for CUDA 12.8",
        "cupy-cuda12x",
        "FlashInfer 0.7.4",
        "Triton 3.6.0",
    ]


# What is wrong with an otherwise good machine, and the one sentence about it.
PROBLEMS = {
    "a card without a driver": (
        {"driver": None, "driver_cuda": None, "gpus": ()},
        "there is an NVIDIA card but no driver: install NVIDIA's, until nvidia-smi lists the card",
    ),
    "a container without the driver's library": (
        {"driver_cuda": None, "gpus": ()},
        (
            "the driver's library libcuda.so.1 is not found: start a container with --gpus all; "
            "on the machine itself, install the driver whole"
        ),
    ),
    "a GPU that is hidden": (
        {"gpus": (), "driver_error": "CUDA_ERROR_NO_DEVICE"},
        (
            "CUDA sees no GPU (CUDA_ERROR_NO_DEVICE): compare nvidia-smi and CUDA_VISIBLE_DEVICES; "
            "a GPU with MIG on needs an instance"
        ),
    ),
    "an old GPU": (
        {"gpus": (CudaDevice("Tesla T4", (7, 5)),)},
        "GPU 0: Tesla T4, compute capability 7.5: at least 8.0 is needed (Ampere)",
    ),
    "no torch": (
        {"torch": None, "torch_cuda": None},
        "torch is not installed: it comes with the extra gpu",
    ),
    "a torch for CPUs": (
        {"torch": "2.13.0+cpu", "torch_cuda": None},
        "torch 2.13.0+cpu is built without CUDA: install the one of the extra gpu",
    ),
    "a torch for CPUs beside a newer driver": (
        {"torch": "2.13.0+cpu", "torch_cuda": None, "driver_cuda": (13, 0), "cupys": ("cupy-cuda13x",)},
        "torch 2.13.0+cpu is built without CUDA: install the one of the extra gpu-cu13",
    ),
    "an old driver": (
        {"torch": "2.13.0", "torch_cuda": (13, 0), "cupys": ("cupy-cuda13x",)},
        (
            "torch 2.13.0 for CUDA 13.0 is too new for the driver, which ends at CUDA 12.8: "
            "update the driver, or install the extra gpu, which is for CUDA 12"
        ),
    ),
    "no CuPy": (
        {"cupys": ()},
        "CuPy is not installed: cupy-cuda12x comes with the extra gpu",
    ),
    "no CuPy beside a torch for CUDA 13": (
        {"cupys": (), "torch_cuda": (13, 0), "driver_cuda": (13, 0)},
        "CuPy is not installed: cupy-cuda13x comes with the extra gpu-cu13",
    ),
    "both CuPys": (
        {"cupys": ("cupy-cuda12x", "cupy-cuda13x")},
        (
            "cupy-cuda12x and cupy-cuda13x are installed, and overwrite each other: "
            "uninstall all, then install cupy-cuda12x"
        ),
    ),
    "CuPy of another CUDA": (
        {"cupys": ("cupy-cuda13x",)},
        "cupy-cuda13x and a torch for CUDA 12.8 do not go together: uninstall it and install cupy-cuda12x",
    ),
    "nothing to compute attention with": (
        {"why_not_flashinfer": NO_NVCC, "triton": None, "missing_for_triton": ("triton",)},
        f"{NO_NVCC}, and Triton cannot stand in for want of triton",
    ),
    "no compiler at all": (
        {"why_not_flashinfer": NO_NVCC, "missing_for_triton": ("cc", "Python.h")},
        f"{NO_NVCC}, and Triton cannot stand in for want of cc and Python.h",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_keeps_a_gpu_from_being_used_is_one_sentence(name: str) -> None:
    changes, sentence = PROBLEMS[name]
    machine = replace(GOOD, **changes)  # type: ignore[arg-type]
    assert said(machine, Level.PROBLEM) == [sentence]
    with pytest.raises(ValueError) as caught:
        require_cuda(machine)
    assert str(caught.value) == sentence


WARNINGS = {
    "no nvcc": ({"why_not_flashinfer": NO_NVCC}, f"{NO_NVCC}: attention runs on Triton"),
    "no Triton": (
        {"triton": None, "missing_for_triton": ("triton",)},
        "Triton could not stand in for FlashInfer, for want of triton",
    ),
    "no Python.h": (
        {"missing_for_triton": ("Python.h",)},
        "Triton could not stand in for FlashInfer, for want of Python.h",
    ),
    "MIG": (
        {"gpus": (CudaDevice("NVIDIA H200 MIG 1g.18gb", (9, 0)),)},
        (
            "GPU 0: NVIDIA H200 MIG 1g.18gb, compute capability 9.0: MIG is on, which CUDA IPC does not work with: "
            "blocks go through pinned host memory instead of CUDA IPC"
        ),
    ),
    "WSL2": (
        {"is_wsl": True, "driver": None, "num_cards": 0},
        "WSL2 has no CUDA IPC: blocks go through pinned host memory instead of CUDA IPC",
    ),
    "no P2P": (
        {"gpus": (H200,) * 3, "apart": ((1, 0), (2, 0))},
        (
            "GPUs 0 and 1, 0 and 2 cannot reach each other's memory (no P2P): between workers on them "
            "blocks go through pinned host memory instead of CUDA IPC"
        ),
    ),
    "a container's processes": (
        {"own_pid_namespace": True},
        (
            "this container has its own PID namespace: its workers hand blocks only to each other; "
            "start containers with --pid=host, or keep workers that belong together in one"
        ),
    ),
    "a container's memory": (
        {"own_ipc_namespace": True},
        (
            "this container has its own IPC namespace: its workers hand blocks only to each other; "
            "start containers with --ipc=host, or keep workers that belong together in one"
        ),
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_what_makes_a_gpu_slower_is_one_sentence_and_no_reason_to_refuse(name: str) -> None:
    changes, sentence = WARNINGS[name]
    machine = replace(GOOD, **changes)  # type: ignore[arg-type]
    assert said(machine, Level.WARNING) == [sentence]
    assert said(machine, Level.PROBLEM) == []
    assert require_cuda(machine) is machine


def test_all_problems_are_named_at_once() -> None:
    machine = replace(GOOD, torch_cuda=None, cupys=(), why_not_flashinfer=NO_NVCC, missing_for_triton=("cc",))
    with pytest.raises(ValueError) as caught:
        require_cuda(machine)
    assert str(caught.value) == "; ".join(said(machine, Level.PROBLEM))
    assert len(said(machine, Level.PROBLEM)) == 3


@pytest.mark.parametrize("driver_cuda", [(12, 0), (12, 8), (12, 9), (13, 1)])
def test_driver_serves_any_cuda_of_its_major_and_older_ones(driver_cuda: tuple[int, int]) -> None:
    assert said(replace(GOOD, driver_cuda=driver_cuda), Level.PROBLEM) == []


def test_cupy_that_was_built_here_is_taken_at_its_word() -> None:
    assert said(replace(GOOD, cupys=("cupy",)), Level.PROBLEM) == []

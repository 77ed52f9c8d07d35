"""What keeps a machine's GPUs from being used, or from being used well: one sentence each, with what to do about it.

A *problem* keeps a worker on device cuda from starting. A *warning* is a slower way that is taken instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from engine.cuda.machine import Machine, look

NO_GPU = "this machine has no GPU: Tandem runs on its CPU"
LEAST_COMPUTE_CAPABILITY = (8, 0)  # bfloat16, and what FlashInfer and the kernels here are compiled for

# CUDA's majors that there are extras for: the extra, and its CuPy.
_EXTRAS = {12: ("gpu", "cupy-cuda12x"), 13: ("gpu-cu13", "cupy-cuda13x")}
_STAGED = "blocks go through pinned host memory instead of CUDA IPC"


class Level(Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    sentence: str


def require_cuda(machine: Machine | None = None) -> Machine:
    """What a worker on device cuda calls before it loads anything.

    Args:
        machine: None: this one.

    Raises:
        ValueError: it cannot run here; all reasons, a sentence each.
    """
    machine = machine or look()
    if not machine.has_gpu:
        raise ValueError("device is cuda, and this machine has no NVIDIA GPU")
    problems = [finding.sentence for finding in findings(machine) if finding.level is Level.PROBLEM]
    if problems:
        raise ValueError("; ".join(problems))
    return machine


def findings(machine: Machine) -> list[Finding]:
    """All there is to say, in the order in which it is best mended; one line of a machine without a GPU."""
    if not machine.has_gpu:
        return [_ok(NO_GPU)]
    parts = (_driver, _gpus, _torch, _cupy, _attention, _between_workers)
    return [finding for part in parts for finding in part(machine)]


def _ok(sentence: str) -> Finding:
    return Finding(Level.OK, sentence)


def _warning(sentence: str) -> Finding:
    return Finding(Level.WARNING, sentence)


def _problem(sentence: str) -> Finding:
    return Finding(Level.PROBLEM, sentence)


def _driver(machine: Machine) -> Iterator[Finding]:
    if machine.driver is None and not machine.is_wsl:
        yield _problem("there is an NVIDIA card but no driver: install NVIDIA's, until nvidia-smi lists the card")
    elif machine.driver_cuda is None:
        yield _problem(
            "the driver's library libcuda.so.1 is not found: start a container with --gpus all; "
            "on the machine itself, install the driver whole"
        )
    elif not machine.gpus:
        why = f" ({machine.driver_error})" if machine.driver_error else ""
        yield _problem(
            f"CUDA sees no GPU{why}: compare nvidia-smi and CUDA_VISIBLE_DEVICES; a GPU with MIG on needs an instance"
        )
    else:
        yield _ok(f"driver {machine.driver or 'of Windows'}, for CUDA up to {_dotted(machine.driver_cuda)}")


def _gpus(machine: Machine) -> Iterator[Finding]:
    for number, gpu in enumerate(machine.gpus):
        said = f"GPU {number}: {gpu.name}, compute capability {_dotted(gpu.compute_capability)}"
        if gpu.compute_capability < LEAST_COMPUTE_CAPABILITY:
            yield _problem(f"{said}: at least {_dotted(LEAST_COMPUTE_CAPABILITY)} is needed (Ampere)")
        elif gpu.is_mig:
            yield _warning(f"{said}: MIG is on, which CUDA IPC does not work with: {_STAGED}")
        else:
            yield _ok(said)


def _torch(machine: Machine) -> Iterator[Finding]:
    if machine.torch is None:
        yield _problem(f"torch is not installed: it comes with the extra {_extra(machine)}")
    elif machine.torch_cuda is None:
        yield _problem(f"torch {machine.torch} is built without CUDA: install the one of the extra {_extra(machine)}")
    else:
        built = f"torch {machine.torch} for CUDA {_dotted(machine.torch_cuda)}"
        # Within a major any driver serves any CUDA.
        if machine.driver_cuda is not None and machine.driver_cuda[0] < machine.torch_cuda[0]:
            yield _problem(
                f"{built} is too new for the driver, which ends at CUDA {_dotted(machine.driver_cuda)}: "
                "update the driver, or install the extra gpu, which is for CUDA 12"
            )
        else:
            yield _ok(built)


def _cupy(machine: Machine) -> Iterator[Finding]:
    major = _major(machine)
    extra, wanted = _EXTRAS[major]
    if not machine.cupys:
        yield _problem(f"CuPy is not installed: {wanted} comes with the extra {extra}")
    elif len(machine.cupys) > 1:
        yield _problem(
            f"{_listed(machine.cupys)} are installed, and overwrite each other: uninstall all, then install {wanted}"
        )
    elif machine.torch_cuda is not None and machine.cupys[0] not in (
        wanted,
        "cupy",
    ):  # cupy: built here, for what is here
        yield _problem(
            f"{machine.cupys[0]} and a torch for CUDA {_dotted(machine.torch_cuda)} do not go together: "
            f"uninstall it and install {wanted}"
        )
    else:
        yield _ok(machine.cupys[0])


def _attention(machine: Machine) -> Iterator[Finding]:
    why_not, triton_lacks = machine.why_not_flashinfer, machine.missing_for_triton
    if why_not and triton_lacks:
        yield _problem(f"{why_not}, and Triton cannot stand in for want of {_listed(triton_lacks)}")
        return
    if why_not:
        yield _warning(f"{why_not}: attention runs on Triton")
    else:
        yield _ok(f"FlashInfer {machine.flashinfer}")
    if triton_lacks:
        yield _warning(f"Triton could not stand in for FlashInfer, for want of {_listed(triton_lacks)}")
    else:
        yield _ok(f"Triton {machine.triton}")


def _between_workers(machine: Machine) -> Iterator[Finding]:
    if machine.is_wsl:
        yield _warning(f"WSL2 has no CUDA IPC: {_STAGED}")
    if machine.apart:
        pairs = ", ".join(f"{j} and {i}" for i, j in machine.apart)
        yield _warning(f"GPUs {pairs} cannot reach each other's memory (no P2P): between workers on them {_STAGED}")
    for kind, is_own in (("PID", machine.own_pid_namespace), ("IPC", machine.own_ipc_namespace)):
        if is_own:
            yield _warning(
                f"this container has its own {kind} namespace: its workers hand blocks only to each other; "
                f"start containers with --{kind.lower()}=host, or keep workers that belong together in one"
            )


def _major(machine: Machine) -> int:
    """Of the CUDA that packages should be for: torch's, or else the newest that the driver serves."""
    cuda = machine.torch_cuda or machine.driver_cuda
    return min(max(cuda[0], 12), 13) if cuda else 12


def _extra(machine: Machine) -> str:
    return _EXTRAS[_major(machine)][0]


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _listed(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

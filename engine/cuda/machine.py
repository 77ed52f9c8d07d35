"""What a machine has that a GPU worker needs: facts, without a judgement.

Looked up in files and in the metadata of packages, none of which is imported. Of CUDA only the driver's library is
asked, where a driver is loaded; that makes no context and takes no memory of a GPU.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from engine.attention.flashinfer_install import why_not_flashinfer

Version = tuple[int, int]  # of CUDA: 12.8 is (12, 8)

_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA, and cards without an output
# The kernel's own, of a process that is in no container.
_HOST_PID_NAMESPACE = "pid:[4026531836]"
_HOST_IPC_NAMESPACE = "ipc:[4026531839]"
_CUPYS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One that CUDA shows to this process."""

    name: str
    compute_capability: tuple[int, int]

    @property
    def is_mig(self) -> bool:
        """Whether it is a part of one."""
        return " MIG " in self.name


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found. The defaults are those of a machine without a GPU."""

    num_cards: int = 0  # of NVIDIA's on the PCI bus
    driver: str | None = None  # the version of the kernel's, such as 570.124.06
    driver_cuda: Version | None = None  # the newest CUDA that the driver's library serves; None: no such library
    driver_error: str | None = None  # why the library shows no GPU, by CUDA's name
    gpus: tuple[CudaDevice, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()  # pairs of `gpus` that cannot reach each other's memory
    torch: str | None = None  # versions of packages; None: not installed
    torch_cuda: Version | None = None  # that torch was built for; None: for CPUs
    cupys: tuple[str, ...] = ()  # distributions, such as cupy-cuda12x
    flashinfer: str | None = None
    why_not_flashinfer: str | None = None  # why it cannot be used, in a sentence; None: it can
    triton: str | None = None
    missing_for_triton: tuple[str, ...] = ()  # of triton, and of what it compiles with: cc and Python.h
    is_wsl: bool = False
    own_pid_namespace: bool = False  # not the host's: a container
    own_ipc_namespace: bool = False

    @property
    def has_gpu(self) -> bool:
        """Whether there is any sign of NVIDIA's, usable or not."""
        return bool(self.num_cards or self.driver or self.gpus)


def look(root: Path = Path("/"), libcuda: str = "libcuda.so.1") -> Machine:
    """This machine, as this process sees it; takes milliseconds without a driver, and a moment of CUDA's with one.

    Args:
        root: where /proc and /sys are.
        libcuda: the driver's library.
    """
    proc = root / "proc"
    driver = _version(_read(proc / "driver/nvidia/version"))
    is_wsl = "microsoft" in _read(proc / "sys/kernel/osrelease").lower()
    # WSL's driver is in Windows: its kernel knows of none.
    answer = _ask(libcuda) if driver or is_wsl else _Answer()
    torch, torch_cuda = _torch()
    return Machine(
        num_cards=_num_cards(root / "sys/bus/pci/devices"),
        driver=driver,
        driver_cuda=answer.cuda,
        driver_error=answer.error,
        gpus=answer.gpus,
        apart=answer.apart,
        torch=torch,
        torch_cuda=torch_cuda,
        cupys=tuple(name for name in _CUPYS if _installed(name)),
        flashinfer=_installed("flashinfer-python"),
        why_not_flashinfer=why_not_flashinfer(),
        triton=_installed("triton"),
        missing_for_triton=_missing_for_triton(),
        is_wsl=is_wsl,
        own_pid_namespace=_is_own(proc / "self/ns/pid", _HOST_PID_NAMESPACE),
        own_ipc_namespace=_is_own(proc / "self/ns/ipc", _HOST_IPC_NAMESPACE),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _version(text: str) -> str | None:
    found = re.search(r"\d{3}\.\d+(\.\d+)?", text)
    return found.group() if found else None


def _num_cards(devices: Path) -> int:
    return sum(
        _read(device / "vendor").strip() == _NVIDIA and _read(device / "class").startswith(_DISPLAY_CLASSES)
        for device in (devices.iterdir() if devices.is_dir() else ())
    )


def _is_own(namespace: Path, of_host: str) -> bool:
    try:
        return os.readlink(namespace) != of_host
    except OSError:
        return False  # it cannot be known


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> tuple[str | None, Version | None]:
    """Torch's version, and the CUDA that it was built for: read, since importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    text = _read(Path(spec.origin).with_name("version.py"))
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b.* = '(\d+)\.(\d+)", text, re.MULTILINE)
    return version.group(1) if version else "?", (int(cuda[1]), int(cuda[2])) if cuda else None


def _missing_for_triton() -> tuple[str, ...]:
    """It compiles what starts its kernels, a Python extension in C; the compiler is looked for as it does."""
    compiler = os.environ.get("CC")
    found = {
        "triton": _installed("triton"),
        "cc": shutil.which(compiler) if compiler else shutil.which("gcc") or shutil.which("clang"),
        "Python.h": (Path(sysconfig.get_path("include")) / "Python.h").is_file(),
    }
    return tuple(name for name, where in found.items() if not where)


# --- the driver's library

_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_…


@dataclass(frozen=True, slots=True)
class _Answer:
    cuda: Version | None = None
    error: str | None = None
    gpus: tuple[CudaDevice, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()


class _DriverError(Exception):
    """A function of the driver failed; the message is CUDA's name of the error."""


def _ask(libcuda: str) -> _Answer:
    try:
        driver = _Driver(ctypes.CDLL(libcuda))
    except OSError:
        return _Answer()
    version = 0, 0
    try:
        number = driver.number("cuDriverGetVersion")
        version = number // 1000, number % 1000 // 10
        driver.call("cuInit", 0)
        devices = [driver.number("cuDeviceGet", i) for i in range(driver.number("cuDeviceGetCount"))]
        gpus = tuple(driver.gpu(device) for device in devices)
        apart = tuple(
            (i, j)
            for i in range(len(devices))
            for j in range(i)
            if not (driver.reaches(devices[i], devices[j]) and driver.reaches(devices[j], devices[i]))
        )
    except _DriverError as exc:
        return _Answer(version, error=str(exc))
    return _Answer(version, gpus=gpus, apart=apart)


class _Driver:
    """The functions of libcuda that are needed here, none of which makes a context."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, function: str, *arguments: object) -> None:
        if status := getattr(self._library, function)(*arguments):
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(name))
            raise _DriverError(name.value.decode() if name.value else f"error {status}")

    def number(self, function: str, *arguments: object) -> int:
        """The function's answer, which it writes through its first parameter."""
        answer = ctypes.c_int()
        self.call(function, ctypes.byref(answer), *arguments)
        return answer.value

    def gpu(self, device: int) -> CudaDevice:
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, len(name), device)
        major, minor = (
            self.number("cuDeviceGetAttribute", attribute, device)
            for attribute in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR)
        )
        return CudaDevice(name.value.decode(errors="replace"), (major, minor))

    def reaches(self, device: int, peer: int) -> bool:
        return bool(self.number("cuDeviceCanAccessPeer", device, peer))

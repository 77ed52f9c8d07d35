"""What is found on a machine: in its files, its packages, and from a driver's library that a test has made."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cuda.machine import CudaDevice, look

# The functions of libcuda that are asked, over three GPUs of which the last reaches no other.
LIBCUDA = r"""
#include <stdio.h>
#include <string.h>
static int initialized = 0;
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuInit(unsigned flags) { if (INIT_STATUS == 0) initialized = 1; return INIT_STATUS; }
int cuDeviceGetCount(int *count) { *count = 3; return initialized ? 0 : 3; }
int cuDeviceGet(int *device, int ordinal) { *device = 70 + ordinal; return ordinal < 3 ? 0 : 101; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Card %d", device); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? device - 70 : -1;
    return 0;
}
int cuDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != 72; return device == peer; }
int cuGetErrorName(int status, const char **name) {
    *name = status == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_ELSE";
    return 0;
}
"""


def libcuda(folder: Path, init_status: int = 0) -> str:
    source, library = folder / "cuda.c", folder / "libcuda.so.1"
    source.write_text(LIBCUDA)
    compiler = shutil.which("cc")
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", f"-DINIT_STATUS={init_status}", "-o", library, source], check=True)
    return str(library)


class FakeRoot:
    """A machine's /proc and /sys."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "proc/self/ns").mkdir(parents=True)
        self.namespaces(4026531836, 4026531839)

    def namespaces(self, pid: int, ipc: int) -> None:
        for kind, inode in (("pid", pid), ("ipc", ipc)):
            link = self.path / "proc/self/ns" / kind
            link.unlink(missing_ok=True)
            link.symlink_to(f"{kind}:[{inode}]")

    def write(self, path: str, text: str) -> None:
        file = self.path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def add_card(self, address: str, *, vendor: str = "0x10de", device_class: str = "0x030200") -> None:
        self.write(f"sys/bus/pci/devices/{address}/vendor", f"{vendor}\n")
        self.write(f"sys/bus/pci/devices/{address}/class", f"{device_class}\n")

    def add_driver(self, line: str) -> None:
        self.write("proc/driver/nvidia/version", f"NVRM version: {line}\nGCC version:  gcc version 12.3.0\n")


OPEN_DRIVER = "NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (root@host)"
CLOSED_DRIVER = "NVIDIA UNIX x86_64 Kernel Module  535.104  Sat Aug 19 01:15:15 UTC 2023"


@pytest.fixture
def root(tmp_path: Path) -> FakeRoot:
    return FakeRoot(tmp_path / "root")


def test_machine_without_anything_of_nvidias_has_no_gpu_and_its_driver_is_not_looked_for(
    root: FakeRoot, tmp_path: Path
) -> None:
    root.add_card("0000:00:01.0", vendor="0x1af4")
    machine = look(root.path, libcuda(tmp_path))
    assert not machine.has_gpu
    assert (machine.num_cards, machine.driver, machine.driver_cuda, machine.gpus) == (0, None, None, ())
    assert (machine.own_pid_namespace, machine.own_ipc_namespace, machine.is_wsl) == (False, False, False)


def test_cards_are_counted_on_the_bus_and_their_sound_is_not(root: FakeRoot) -> None:
    root.add_card("0000:01:00.0")
    root.add_card("0000:01:00.1", device_class="0x040300")
    root.add_card("0000:02:00.0", device_class="0x030000")
    machine = look(root.path, "libcuda-of-nobody.so")
    assert (machine.num_cards, machine.driver, machine.has_gpu) == (2, None, True)


@pytest.mark.parametrize(("line", "version"), [(OPEN_DRIVER, "570.124.06"), (CLOSED_DRIVER, "535.104")])
def test_driver_is_asked_for_its_gpus(root: FakeRoot, tmp_path: Path, line: str, version: str) -> None:
    root.add_driver(line)
    machine = look(root.path, libcuda(tmp_path))
    assert (machine.driver, machine.driver_cuda, machine.driver_error) == (version, (12, 8), None)
    assert machine.gpus == (CudaDevice("Card 70", (9, 0)), CudaDevice("Card 71", (9, 1)), CudaDevice("Card 72", (9, 2)))
    assert machine.apart == ((2, 0), (2, 1))


def test_driver_that_shows_no_gpu_says_why(root: FakeRoot, tmp_path: Path) -> None:
    root.add_driver(OPEN_DRIVER)
    machine = look(root.path, libcuda(tmp_path, init_status=100))
    assert (machine.driver_cuda, machine.driver_error, machine.gpus) == ((12, 8), "CUDA_ERROR_NO_DEVICE", ())


def test_driver_without_its_library_is_a_container_without_gpus(root: FakeRoot) -> None:
    root.add_driver(OPEN_DRIVER)
    machine = look(root.path, "libcuda-of-nobody.so")
    assert (machine.driver, machine.driver_cuda, machine.has_gpu) == ("570.124.06", None, True)


def test_wsl_has_the_library_and_no_driver_of_its_own(root: FakeRoot, tmp_path: Path) -> None:
    root.write("proc/sys/kernel/osrelease", "5.15.167.4-microsoft-standard-WSL2\n")
    machine = look(root.path, libcuda(tmp_path))
    assert (machine.is_wsl, machine.driver, len(machine.gpus), machine.has_gpu) == (True, None, 3, True)
    assert not look(root.path, "libcuda-of-nobody.so").has_gpu


def test_containers_are_known_by_their_namespaces(root: FakeRoot) -> None:
    root.namespaces(4026532201, 4026531839)
    machine = look(root.path)
    assert (machine.own_pid_namespace, machine.own_ipc_namespace) == (True, False)
    root.namespaces(4026531836, 4026532200)
    machine = look(root.path)
    assert (machine.own_pid_namespace, machine.own_ipc_namespace) == (False, True)


def test_part_of_a_gpu_is_known_by_its_name() -> None:
    assert CudaDevice("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0)).is_mig
    assert not CudaDevice("NVIDIA A100-SXM4-40GB", (8, 0)).is_mig


@pytest.mark.parametrize(
    ("version_file", "found"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", ("2.13.0+cpu", None)),
        ("__version__ = '2.10.0'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", ("2.10.0", (12, 8))),
        ("__version__ = '2.4.0'\ncuda = '12.1'\n", ("2.4.0", (12, 1))),
    ],
)
def test_torchs_cuda_is_read_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version_file: str, found: tuple[str, tuple[int, int] | None]
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "torch/version.py").write_text(version_file)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    machine = look(tmp_path)
    assert (machine.torch, machine.torch_cuda) == found


def test_compiler_is_looked_for_where_triton_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cc" in look(tmp_path).missing_for_triton
    (tmp_path / "clang").touch(mode=0o755)
    assert "cc" not in look(tmp_path).missing_for_triton
    monkeypatch.setenv("CC", "gcc-14")  # taken at its word
    assert "cc" in look(tmp_path).missing_for_triton


def test_looking_loads_neither_torch_nor_cupy() -> None:
    code = (
        "import sys; from engine.cuda.doctor import findings; from engine.cuda.machine import look; findings(look());"
        "print({'torch', 'cupy', 'numpy', 'triton', 'flashinfer'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

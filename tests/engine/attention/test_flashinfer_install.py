"""What is said of FlashInfer without importing it."""

import stat
import sys
from pathlib import Path

import pytest

import fake_flashinfer
from engine.attention import default_backend
from engine.attention.flashinfer_install import why_not_flashinfer


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One with FlashInfer, and a folder for its tools; nothing else of this machine's is seen."""
    fake_flashinfer.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "flashinfer_jit_cache")
    for name in ("CUDA_PATH", "CXX", "FLASHINFER_NVCC", "FLASHINFER_DISABLE_JIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    return tmp_path


def put(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def put_all(machine: Path) -> None:
    for tool in ("cuda/bin/nvcc", "bin/ninja", "bin/c++"):
        put(machine / tool)


def test_the_package_is_missing_on_this_machine() -> None:
    assert why_not_flashinfer() == "the package flashinfer-python is not installed"


def test_with_all_its_tools_it_is_the_default_of_a_gpu(machine: Path) -> None:
    put_all(machine)
    assert why_not_flashinfer() is None
    assert default_backend("cuda", "bfloat16", 128) == "flashinfer"


def test_float32_and_a_cpu_have_other_defaults(machine: Path) -> None:
    put_all(machine)
    assert default_backend("cuda", "float32", 128) == "triton"
    assert default_backend("cpu", "bfloat16", 128) == "cpu"


@pytest.mark.parametrize("head_dim", [80, 96])
def test_heads_that_it_has_no_kernels_for_have_another_default(machine: Path, head_dim: int) -> None:
    put_all(machine)
    assert default_backend("cuda", "bfloat16", head_dim) == "triton"


def test_ninja_may_lie_beside_the_interpreter_whoever_activated_it(machine: Path) -> None:
    put_all(machine)
    (machine / "bin/ninja").unlink()
    put(machine / "venv/bin/ninja")
    assert why_not_flashinfer() is None


@pytest.mark.parametrize(
    ("tool", "name"), [("cuda/bin/nvcc", "nvcc"), ("bin/ninja", "ninja"), ("bin/c++", "a C++ compiler")]
)
def test_each_missing_tool_is_named(machine: Path, tool: str, name: str) -> None:
    put_all(machine)
    (machine / tool).unlink()
    assert why_not_flashinfer() == f"FlashInfer compiles its kernels at first use, and {name} cannot be found"
    assert default_backend("cuda", "bfloat16", 128) == "triton"


def test_all_that_is_missing_is_named_at_once(machine: Path) -> None:
    assert str(why_not_flashinfer()).endswith("nvcc and ninja and a C++ compiler cannot be found")


def test_nvcc_is_found_where_flashinfer_looks(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_all(machine)
    (machine / "cuda/bin/nvcc").rename(machine / "cuda/bin/nvcc-12")
    assert why_not_flashinfer() is not None
    monkeypatch.setenv("FLASHINFER_NVCC", str(machine / "cuda/bin/nvcc-12"))
    assert why_not_flashinfer() is None
    monkeypatch.delenv("FLASHINFER_NVCC")
    put(machine / "other/bin/nvcc")
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("CUDA_PATH", str(machine / "other"))
    assert why_not_flashinfer() is None
    monkeypatch.delenv("CUDA_PATH")
    monkeypatch.setenv("PATH", f"{machine / 'bin'}:{machine / 'other/bin'}")
    assert why_not_flashinfer() is None


def test_the_c_compiler_may_be_another(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_all(machine)
    put(machine / "bin/clang++")
    (machine / "bin/c++").unlink()
    monkeypatch.setenv("CXX", "clang++")
    assert why_not_flashinfer() is None


def test_kernels_that_are_there_already_need_no_tools(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)
    assert why_not_flashinfer() is None


def test_compiling_may_be_forbidden(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_all(machine)
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert "FLASHINFER_DISABLE_JIT is set" in str(why_not_flashinfer())

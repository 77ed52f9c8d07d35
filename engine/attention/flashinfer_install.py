"""What FlashInfer needs to be here, found out without importing it: an import touches CUDA.

Its kernels come ready in the package flashinfer-jit-cache, or are compiled by nvcc, ninja and a C++ compiler, each
variant when a process first meets it. Where they are looked for is FlashInfer's own way (0.7.4: jit/cpp_ext.py).
"""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

# What its kernels are for.
FLASHINFER_DTYPES = ("bfloat16", "float16")
FLASHINFER_HEAD_DIMS = (64, 128, 256)

_DEFAULT_CUDA_HOME = "/usr/local/cuda"


def why_not_flashinfer() -> str | None:
    """Why FlashInfer cannot serve attention here, in a sentence; None: it can, as far as files say."""
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    if find_spec("flashinfer_jit_cache") is not None:
        return None
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return "FLASHINFER_DISABLE_JIT is set, and flashinfer-jit-cache, which has the kernels ready, is not installed"
    missing = [
        name
        for name, path in (
            ("nvcc", _nvcc()),
            ("ninja", shutil.which("ninja", path=path_with_own_tools())),
            ("a C++ compiler", shutil.which(os.environ.get("CXX", "c++"))),
        )
        if path is None
    ]
    if missing:
        return f"FlashInfer compiles its kernels at first use, and {' and '.join(missing)} cannot be found"
    return None


def path_with_own_tools() -> str:
    """PATH, and behind it this interpreter's folder: pip puts ninja there, and nobody need have activated it."""
    return os.pathsep.join(filter(None, (os.environ.get("PATH"), str(Path(sys.executable).parent))))


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        # The folder above the one that PATH names; headers are looked for there.
        on_path = shutil.which("nvcc")
        home = str(Path(on_path).parent.parent) if on_path else _DEFAULT_CUDA_HOME
    if not Path(home).exists():
        return None
    return shutil.which(os.environ.get("FLASHINFER_NVCC", f"{home}/bin/nvcc"))

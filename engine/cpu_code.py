"""How numba compiles for this project, and how machine code reads and writes bfloat16.

bfloat16, which numba lacks, is uint16 to it: its sixteen bits are the upper half of a float32.

Everything compiles on first use and is kept on disk beside the source, so that only the first start of all pays. It is
kept under a digest of all kernels' sources: numba itself looks at the file of a function alone, and would go on using
what was compiled with other functions that this one calls.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

P = ParamSpec("P")
R = TypeVar("R")
Array = npt.NDArray[Any]

# Threads of its own that sleep between launches: no OpenMP runtime to share with torch, nothing to install. It allows
# one launch at a time, and ends the process if two come at once.
numba.config.THREADING_LAYER = "workqueue"  # type: ignore[attr-defined]
MAX_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
_launching = threading.Lock()

_ENGINE = Path(__file__).parent


def sources_digest(folder: Path = _ENGINE) -> str:
    """Of every file that machine code is compiled from: those named `cpu_*.py`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("cpu_*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


# NUMBA_CACHE_DIR, if it is set, says where; a folder that cannot be written is passed over for one of the user's.
_CACHE = Path(numba.config.CACHE_DIR or _ENGINE / "__pycache__")  # type: ignore[attr-defined]
numba.config.CACHE_DIR = str(_CACHE / f"kernels-{sources_digest()}")  # type: ignore[attr-defined]

# Sums may be reordered (or nothing vectorizes), but a NaN stays one: a broken model must not look like a sound one.
_SAFE_FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiled on its first call with arguments of some types, kept on disk; runs without the GIL.

    Its arithmetic is IEEE's, operation by operation: so its results do not depend, to the bit, on what it is compiled
    together with. Sums that are to be vectors are in `cpu_sums` and `cpu_tiles`.
    """
    return cast("Callable[P, R]", numba.njit(cache=True, nogil=True, error_model="numpy")(function))


def loose_kernel(function: Callable[P, R]) -> Callable[P, R]:
    """One whose sums the compiler may reorder: last bits are its choice, anew for whatever it is compiled into."""
    compiled = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=_SAFE_FAST_MATH)(function)
    return cast("Callable[P, R]", compiled)


def parallel_kernel(function: Callable[P, R]) -> Callable[P, R]:
    """A `kernel` with `prange` loops."""
    return cast("Callable[P, R]", numba.njit(cache=True, nogil=True, error_model="numpy", parallel=True)(function))


@contextmanager
def launch(num_threads: int) -> Iterator[None]:
    """Around the call of a `parallel_kernel`: its threads, at most MAX_THREADS, are this call's alone."""
    with _launching:
        numba.set_num_threads(num_threads)
        yield


def _as_float_code(typing_context: Any, element: Any) -> Any:
    """A float32 or bfloat16 as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.float32:
            return args[0]
        number = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], number), number(16)), ir.FloatType())

    return types.float32(element), generate


def _as_element_code(typing_context: Any, number: Any, like: Any) -> Any:
    """A float32 as whatever `like` is, rounded to nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.return_type == types.float32:
            return args[0]
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.lshr(builder.add(builder.add(bits, word(0x7FFF)), odd), word(16))
        is_number = builder.fcmp_ordered("ord", args[0], args[0])
        # Rounding could carry a NaN over into a number.
        return builder.trunc(builder.select(is_number, rounded, word(0x7FC0)), ir.IntType(16))

    return like(types.float32, like), generate


as_float: Any = intrinsic(_as_float_code)
as_element: Any = intrinsic(_as_element_code)


def as_numpy(tensor: torch.Tensor) -> Array:
    """The tensor's memory as an array; bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()

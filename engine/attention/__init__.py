"""Attention over the block pool: the life of a key.

A token's key and value are computed once, by whichever worker computes the token. They are written into the slot that
the block table names, before any query of the same step looks; they are read there by every later token of the request,
and by other requests that share the block; they leave when the block is given back and overwritten. Nothing but the
slot says where a key is, so blocks may be anywhere in the pool, and come from another worker.

`backend.py` is the interface. Its implementations are chosen here by name, and imported only when asked for: they load
torch and compilers, which the gateway never does.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from engine.attention.flashinfer_install import FLASHINFER_DTYPES, FLASHINFER_HEAD_DIMS, why_not_flashinfer

if TYPE_CHECKING:
    from engine.attention.backend import AttentionBackend

# Name -> "module:class".
BACKENDS: dict[str, str] = {
    "reference": "engine.attention.reference:ReferenceBackend",
    "cpu": "engine.attention.cpu:CpuBackend",
    "flashinfer": "engine.attention.flashinfer_backend:FlashInferBackend",
    "triton": "engine.attention.triton_backend:TritonBackend",
}


def default_backend(device_type: str, dtype: str, head_dim: int) -> str:
    """The best that can run here, by name. Reads files at most: FlashInfer is not imported to find out.

    Args:
        device_type: "cpu" or "cuda".
        dtype, head_dim: of queries; FlashInfer has kernels for some.
    """
    if device_type == "cpu":
        return "cpu"
    is_served = dtype in FLASHINFER_DTYPES and head_dim in FLASHINFER_HEAD_DIMS
    return "flashinfer" if is_served and why_not_flashinfer() is None else "triton"


def get_backend(name: str, *, num_threads: int = 1, device: str = "cpu") -> "AttentionBackend":
    """The backend of that name, for tensors on `device` (torch's word: "cpu", "cuda:0").

    Raises:
        ValueError: no such backend; the message names those there are.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention backend must be one of {', '.join(BACKENDS)}, not {name!r}")
    module, cls = BACKENDS[name].split(":")
    backend: AttentionBackend = getattr(import_module(module), cls)(num_threads=num_threads, device=device)
    return backend

"""How a pool on a GPU is named: by its handle (`PoolHandle.raw`), and in its own memory."""

import struct
import uuid
from dataclasses import dataclass

# Version, owner's process id, its GPU, the pool's nonce; then CUDA's own handles: the memory's, and one an event.
_HEAD = struct.Struct("<BQ16s16s")
_VERSION = 1
_HANDLE_BYTES = 64  # of CUDA's handles, by definition

# First bytes of the allocation: magic, nonce, size of the pool. The pool starts at OFFSET; its nonce follows it.
HEADER = struct.Struct("<8s16sQ")
MAGIC = b"tandemkv"
OFFSET = 4096


@dataclass(frozen=True, slots=True)
class CudaHandle:
    """Names the memory of a pool on a GPU, and the events that say how far its owner's work on it has come."""

    pid: int
    gpu: bytes  # 16 bytes, the owner's: numbers of GPUs mean something else in every process
    nonce: bytes  # 16 bytes, new with every pool; also in the memory itself
    memory: bytes  # 64 bytes; empty: the owner's GPU shares no memory
    events: tuple[bytes, ...]  # 64 bytes each: the birth event, then the ring of fences

    def pack(self) -> bytes:
        """1,193 bytes with 17 events: it travels once a hand-off."""
        return _HEAD.pack(_VERSION, self.pid, self.gpu, self.nonce) + self.memory + b"".join(self.events)

    @classmethod
    def unpack(cls, raw: bytes) -> "CudaHandle":
        """
        Raises:
            ValueError: it is of another version, or no such handle at all.
        """
        if raw and raw[0] != _VERSION:
            raise ValueError(f"a CUDA pool's handle of version {raw[0]}, not {_VERSION}: run one version of Tandem")
        if len(raw) < _HEAD.size or (len(raw) - _HEAD.size) % _HANDLE_BYTES:
            raise ValueError(f"not a CUDA pool's handle: {len(raw)} bytes")
        _, pid, gpu, nonce = _HEAD.unpack_from(raw)
        memory, *events = [raw[at : at + _HANDLE_BYTES] for at in range(_HEAD.size, len(raw), _HANDLE_BYTES)] or [b""]
        return cls(pid, gpu, nonce, memory, tuple(events))


def gpu_name(gpu: bytes) -> str:
    """A GPU's UUID as nvidia-smi writes it."""
    return f"GPU-{uuid.UUID(bytes=gpu)}"

"""Pools that another process can map, on either device, and what is in them."""

from typing import TYPE_CHECKING

import torch

from engine.memory import DeviceMemory, HostMemory, PoolMemory

if TYPE_CHECKING:
    from kvtransfer.exported import ExportedMemory


def new_pool(device: str, nbytes: int) -> "ExportedMemory":
    """Zeroed memory of a pool."""
    if device == "cpu":
        from kvtransfer.memfd import MemfdMemory

        return MemfdMemory(nbytes)
    from kvtransfer.cuda_ipc import CudaIpcMemory

    return CudaIpcMemory(nbytes, torch.device(device).index or 0)


def as_blocks(memory: PoolMemory, bytes_per_block: int) -> torch.Tensor:
    """[num_blocks, bytes_per_block] uint8, the memory itself."""
    if isinstance(memory, HostMemory):
        flat = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    else:
        assert isinstance(memory, DeviceMemory), memory
        flat = torch.as_tensor(memory, device="cuda")
    return flat.view(-1, bytes_per_block)


def pattern(block_ids: torch.Tensor, bytes_per_block: int, salt: int) -> torch.Tensor:
    """[len(block_ids), bytes_per_block] uint8: what a block holds, different for each block, salt and byte."""
    offsets = torch.arange(bytes_per_block, device=block_ids.device)
    return ((block_ids[:, None] * 131 + offsets * 17 + (offsets >> 8) * 29 + salt * 61) % 251).to(torch.uint8)


def record_fence(memory: PoolMemory) -> int | None:
    """A mark of all that torch's current stream has been given; None on a CPU, where it is done."""
    if isinstance(memory, DeviceMemory):
        return memory.record_fence(torch.cuda.current_stream().cuda_stream)
    return None

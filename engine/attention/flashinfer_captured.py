"""What captured decode steps read: FlashInfer's wrappers of each batch size, over buffers that never move.

A CUDA graph reads at the addresses it was captured with. A wrapper made for graphs copies the indices of each plan into
buffers that it was given, and keeps its batch size. One size is planned and replayed at a time, each anew, so all sizes
share the memory of the largest.
"""

from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.backend import AttentionShape

# A wrapper makes 8 MiB for what its planner decides; for decodes, that is some bytes a request.
_PLAN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Indices:
    """What kernels read of a step, on the device; int32. As in `PagedStep`."""

    batch_indices: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    kv_indptr: torch.Tensor  # [num_requests + 1]
    kv_indices: torch.Tensor  # [kv_indptr[-1]], or more
    last_page_len: torch.Tensor  # [num_requests]


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """What the graph of one batch size reads through, every time at the same addresses."""

    indices: Indices
    wrappers: dict[int | None, Any]  # by window


class CapturedSizes:
    """The batch sizes of one model that there are graphs of.

    Args:
        flashinfer: the module.
        workspace: of all wrappers; its device is that of everything here.
    """

    def __init__(self, flashinfer: Any, workspace: torch.Tensor, shape: AttentionShape) -> None:
        self._flashinfer, self._workspace, self._shape = flashinfer, workspace, shape
        self._captured: dict[int, Captured] = {}
        self._largest: Indices | None = None

    def of(self, size: int) -> Captured:
        """That of a batch of `size`, always the same; made at the first call, with buffers for any request."""
        if size not in self._captured:
            indices = self._make_indices(size)
            wrappers = {window: self._make_wrapper(indices) for window in self._shape.windows}
            self._captured[size] = Captured(indices, wrappers)
        return self._captured[size]

    def _make_indices(self, size: int) -> Indices:
        if self._largest is None or len(self._largest.positions) < size:
            # Smaller sizes of before keep what they have.
            self._largest = self._allocate(size)
        largest = self._largest
        return Indices(
            batch_indices=largest.batch_indices[:size],
            positions=largest.positions[:size],
            kv_indptr=largest.kv_indptr[: size + 1],
            kv_indices=largest.kv_indices,
            last_page_len=largest.last_page_len[:size],
        )

    def _allocate(self, size: int) -> Indices:
        device = self._workspace.device

        def zeros(n: int) -> torch.Tensor:
            return torch.zeros(n, dtype=torch.int32, device=device)

        return Indices(
            batch_indices=torch.arange(size, dtype=torch.int32, device=device),  # a token each
            positions=zeros(size),
            kv_indptr=zeros(size + 1),
            kv_indices=zeros(size * -(-self._shape.max_context_len // self._shape.block_size)),
            last_page_len=zeros(size),
        )

    def _make_wrapper(self, indices: Indices) -> Any:
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indices.kv_indptr,
            paged_kv_indices_buffer=indices.kv_indices,
            paged_kv_last_page_len_buffer=indices.last_page_len,
            backend="fa2",
        )
        wrapper.reset_workspace_buffer(
            self._workspace, torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=self._workspace.device)
        )
        return wrapper

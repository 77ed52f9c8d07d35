"""Attention by FlashInfer's kernels, straight out of the pool.

One layer of the block-major pool, `pool[:, l]`, is what FlashInfer calls a paged cache in layout HND, with strides. So
nothing is copied: keys are appended into their slots, and attended there.

A step is planned once, for all layers: what FlashInfer's planner decides is copied to the GPU beside the indices. A
window is fixed in a plan, so each window of a model has wrappers of its own; and so has each kind of part
(`paged_indices.py`). In CUDA graphs, wrappers of one batch size each read their indices from buffers that never move.

**No context is split.** FlashInfer can cut a long context into pieces for several multiprocessors and add their results
up. Where it cuts follows from the whole batch (by default), or makes a number of pieces that a captured graph has no
room for (`fixed_split_size`); and a decode must not come out differently in a captured step and in one that it shares
with a chunk. So `disable_split_kv` is always set, and a request's bits are its own. What that costs: a KV head of a
decode is read by one multiprocessor, so a batch of fewer requests times KV heads than the GPU has multiprocessors
leaves the others idle, which is felt with few requests of long contexts. `split_kv=True` gives exactness up for speed.
"""

import os
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from engine.attention.backend import UNSCALED, AttentionMetadata, AttentionShape, KVScales, build_metadata
from engine.attention.flashinfer_captured import CapturedSizes, Indices
from engine.attention.flashinfer_install import (
    FLASHINFER_DTYPES,
    FLASHINFER_HEAD_DIMS,
    path_with_own_tools,
    why_not_flashinfer,
)
from engine.attention.paged_indices import NUM_KINDS, ONE_QUERY, PagedStep, Part, paged_step
from engine.attention.stored import stored
from engine.executor import ScheduledRequest

_WORKSPACE_BYTES = 128 << 20  # what FlashInfer asks for


@dataclass(frozen=True, slots=True)
class _PlannedPart:
    """A part of the step, as `attend` runs it."""

    rows: slice | torch.Tensor  # of the flat batch
    wrappers: dict[int | None, Any]  # by window, planned


class FlashInferBackend:
    """The backend `flashinfer`, for one GPU. Used by one thread at a time, in one CUDA stream.

    Args:
        split_kv: lets FlashInfer split long contexts. Then the last bits of a request depend on its batch mates.
    """

    can_replay = True
    needs_torch_threads = True

    def __init__(self, *, num_threads: int = 1, device: str = "cuda", split_kv: bool = False) -> None:
        del num_threads  # of the CPU
        self._device = torch.device(device)
        self._split_kv = split_kv
        self._flashinfer: Any = None
        self._shape: AttentionShape | None = None
        self._workspace = torch.empty(0)
        self._wrappers: dict[tuple[int, int | None], Any] = {}  # by kind of part and window
        self._captured: CapturedSizes | None = None
        self._indices: Indices | None = None
        self._parts: list[_PlannedPart] = []
        self._planned: torch.cuda.Event | None = None  # the last plan is on the device

    def prepare(self, shape: AttentionShape) -> None:
        """Compiles FlashInfer's kernels (minutes, the first time on a machine) by attending to a few tokens.

        Raises:
            ValueError: FlashInfer cannot be used here, or has no kernels for such a model.
        """
        _check(shape)
        if (reason := why_not_flashinfer()) is not None:
            raise ValueError(f"attention backend flashinfer cannot be used: {reason}; triton needs none of it")
        # Importing it makes a context on the current device.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            os.environ["PATH"] = path_with_own_tools()  # it looks for ninja by PATH alone
            self._flashinfer = import_module("flashinfer")
            self._shape = shape
            if self._workspace.numel() == 0:
                self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            self._captured = CapturedSizes(self._flashinfer, self._workspace, shape)
            self._wrappers = {
                (kind, window): self._make_wrapper(kind) for kind in range(NUM_KINDS) for window in shape.windows
            }
            self._attend_to_a_few_tokens(shape)

    def plan(self, metadata: AttentionMetadata, *, replayed: bool = False) -> None:
        assert self._shape is not None, "plan before prepare"
        if self._planned is not None:
            # The planner writes into pinned memory, whose last copy may still be queued behind earlier steps.
            self._planned.synchronize()
        shape = self._shape
        step = paged_step(metadata, block_size=shape.block_size, group_size=shape.num_heads // shape.num_kv_heads)
        indices = self._uploaded(step)
        if replayed:
            assert metadata.num_decodes == metadata.num_requests > 0, "only decodes are replayed"
            self._plan_replayed(step, indices)
        else:
            self._indices = indices
            self._parts = [self._plan_part(part, indices.kv_indices) for part in step.parts]
        if self._device.type == "cuda":
            self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._planned.record()

    def write_kv(
        self, pool_layer_kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scales: KVScales = UNSCALED
    ) -> None:
        assert self._indices is not None, "write_kv before plan"
        # The kernel takes what it is given for elements of the pool's type.
        self._flashinfer.append_paged_kv_cache(
            stored(k, pool_layer_kv.dtype, scales.k),
            stored(v, pool_layer_kv.dtype, scales.v),
            self._indices.batch_indices,
            self._indices.positions,
            pool_layer_kv,
            self._indices.kv_indices,
            self._indices.kv_indptr,
            self._indices.last_page_len,
            kv_layout="HND",
        )

    def attend(
        self, q: torch.Tensor, pool_layer_kv: torch.Tensor, *, window: int | None, scales: KVScales = UNSCALED
    ) -> torch.Tensor:
        assert self._parts, "attend before plan"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in self._parts:
            is_run = isinstance(part.rows, slice)
            rows = out[part.rows] if is_run else torch.empty_like(out[part.rows])
            # The scale of keys goes into that of scores; that of values is multiplied to what comes out.
            part.wrappers[window].run(
                q[part.rows],
                pool_layer_kv,
                k_scale=None if scales.k == 1.0 else scales.k,
                v_scale=None if scales.v == 1.0 else scales.v,
                out=rows,
            )
            if not is_run:
                out[part.rows] = rows
        return out

    # --- planning

    def _make_wrapper(self, kind: int) -> Any:
        if kind == ONE_QUERY:
            # Without tensor cores there are kernels for some group sizes alone; "auto" would switch kernels by shape.
            return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "HND", use_tensor_cores=True, backend="fa2"
            )
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", backend="fa2")

    def _plan_part(self, part: Part, kv_indices: torch.Tensor) -> _PlannedPart:
        assert self._shape is not None
        pages = kv_indices[part.pages]
        wrappers = {window: self._wrappers[part.kind, window] for window in self._shape.windows}
        for window, wrapper in wrappers.items():
            if part.kind == ONE_QUERY:
                self._plan_decodes(wrapper, part, pages, window)
            else:
                wrapper.plan(
                    torch.from_numpy(part.qo_indptr),
                    torch.from_numpy(part.kv_indptr),
                    pages,
                    torch.from_numpy(part.last_page_len),
                    *self._heads(),
                    causal=True,
                    **self._options(window),
                )
        rows = part.rows
        return _PlannedPart(rows if isinstance(rows, slice) else self._on_device(rows), wrappers)

    def _plan_decodes(self, wrapper: Any, part: Part, pages: torch.Tensor, window: int | None) -> None:
        assert self._shape is not None
        wrapper.plan(
            torch.from_numpy(part.kv_indptr),
            pages,
            torch.from_numpy(part.last_page_len),
            *self._heads(),
            **self._options(window),
        )

    def _heads(self) -> tuple[int, int, int, int]:
        """What every plan is told of the model, in FlashInfer's order."""
        assert self._shape is not None
        shape = self._shape
        return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size

    def _options(self, window: int | None) -> dict[str, Any]:
        assert self._shape is not None
        return {
            "window_left": -1 if window is None else window - 1,  # keys to the left of the query's own
            "sm_scale": self._shape.scale,
            "q_data_type": self._shape.dtype,  # else float16
            "kv_data_type": self._shape.kv_dtype,
            "o_data_type": self._shape.dtype,
            "disable_split_kv": not self._split_kv,
        }

    def _plan_replayed(self, step: PagedStep, indices: Indices) -> None:
        assert self._shape is not None
        [part] = step.parts
        assert isinstance(part.rows, slice), part.rows
        assert self._captured is not None
        captured = self._captured.of(part.num_requests)
        room = len(captured.indices.kv_indices)
        assert len(step.kv_indices) <= room, f"{len(step.kv_indices)} blocks, {room} were said to be the most"
        captured.indices.positions.copy_(indices.positions)
        for window, wrapper in captured.wrappers.items():
            # Copies indptr, indices and lengths into the buffers; for every window the same.
            self._plan_decodes(wrapper, part, indices.kv_indices, window)
        self._indices = captured.indices
        self._parts = [_PlannedPart(part.rows, captured.wrappers)]

    def _uploaded(self, step: PagedStep) -> Indices:
        """The step's arrays on the device, by one copy."""
        arrays = (step.batch_indices, step.positions, step.kv_indptr, step.kv_indices, step.last_page_len)
        packed = self._on_device(np.concatenate(arrays))
        ends = np.cumsum([len(array) for array in arrays]).tolist()
        return Indices(*(packed[end - len(array) : end] for array, end in zip(arrays, ends, strict=True)))

    def _on_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        host = torch.from_numpy(array)
        if self._device.type == "cuda":
            # From pinned memory, so that nobody waits; torch keeps it until the copy has ended.
            return host.pin_memory().to(self._device, non_blocking=True)
        return host.to(self._device)

    def _attend_to_a_few_tokens(self, shape: AttentionShape) -> None:
        """Every kernel once: FlashInfer compiles one when it is first planned or called."""
        block = (1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        pool = torch.zeros(block, dtype=shape.kv_dtype, device=self._device)
        q = torch.zeros((3, shape.num_heads, shape.head_dim), dtype=shape.dtype, device=self._device)
        lengths = (1, 2) if shape.block_size > 1 else (1, 1)
        requests = [ScheduledRequest("", [0] * n, 0, ([0],), None) for n in lengths]
        self.plan(build_metadata(requests, block_size=shape.block_size))
        tokens = q[: sum(lengths)]
        k = tokens[:, : shape.num_kv_heads]
        self.write_kv(pool, k, k)
        for window in shape.windows:
            self.attend(tokens, pool, window=window)
        self._indices, self._parts = None, []


def _check(shape: AttentionShape) -> None:
    if str(shape.dtype).removeprefix("torch.") not in FLASHINFER_DTYPES:
        raise ValueError(
            f"attention backend flashinfer computes in bfloat16 or float16, not {shape.dtype}: use triton for that"
        )
    if shape.kv_dtype not in (shape.dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"attention backend flashinfer: KV must be {shape.dtype} or float8_e4m3fn, not {shape.kv_dtype}"
        )
    if shape.head_dim not in FLASHINFER_HEAD_DIMS:
        dims = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
        raise ValueError(
            f"attention backend flashinfer: head_dim must be one of {dims}, not {shape.head_dim}: use triton"
        )

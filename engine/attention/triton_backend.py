"""Attention on a GPU by Triton kernels of our own. They come with torch; a C compiler builds what launches them.

A step is planned on the host: work lists in `triton_plan`, put on the device by `triton_step`. Then each layer launches
at most four kernels of `triton_kernels`: one writes keys and values, one attends chunks, two attend single queries.
Which of them a request goes to depends on its number of queries alone, wherever it stands in the batch.

Under Triton's interpreter (TRITON_INTERPRET=1 before triton is imported) the same code runs on a CPU, slowly: for
tests.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.backend import UNSCALED, AttentionMetadata, AttentionShape, KVScales
from engine.attention.triton_plan import MAX_SPLITS, MIN_SPLIT_LEN
from engine.attention.triton_sizes import (
    COMBINED_AT_ONCE,
    MAX_HEAD_DIM,
    PROGRAMS_PER_SM,
    decode_tile,
    power_of_two,
    prefill_tile,
)
from engine.attention.triton_step import StepPlan, StepPlanner


@dataclass(frozen=True, slots=True)
class Target:
    """What kernels run on."""

    capability: tuple[int, int] | None  # compute capability; None: they are interpreted
    num_programs: int  # of decode, at most

    @classmethod
    def of(cls, device: torch.device) -> "Target":
        """The GPU that is there.

        Raises:
            ValueError: kernels are compiled, but not for such a device.
        """
        import triton

        if triton.knobs.runtime.interpret:
            return cls(None, 5)  # fewer than there is work, as on a GPU
        if device.type != "cuda":
            raise ValueError(f"attention backend triton runs on cuda, and on {device} only under TRITON_INTERPRET=1")
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(torch.cuda.get_device_capability(device), PROGRAMS_PER_SM * num_sms)


class TritonBackend:
    """The backend `triton`. One thread calls it, with its device current; launches go to the current stream."""

    can_replay = True
    needs_torch_threads = True

    def __init__(self, *, num_threads: int = 1, device: str = "cuda") -> None:
        del num_threads
        from engine.attention.triton_kernels import decode, prefill, write

        self._write_kv, self._prefill = write.write_kv, prefill.prefill
        self._decode, self._combine = decode.decode, decode.combine
        self._device = torch.device(device)
        self._target = Target.of(self._device)
        self._shape: AttentionShape | None = None
        self._planner: StepPlanner | None = None
        self._step: StepPlan | None = None

    # --- once

    def prepare(self, shape: AttentionShape) -> None:
        if shape == self._shape:
            return
        capability = self._target.capability
        _check(shape, capability)
        self._shape, self._step = shape, None
        group_size, itemsize = shape.num_heads // shape.num_kv_heads, shape.dtype.itemsize
        block_d = max(16, power_of_two(shape.head_dim))
        # GPUs convert 8-bit floats themselves from compute capability 8.9 on; elsewhere kernels are given bytes.
        self._unpacks_fp8 = shape.kv_dtype.itemsize == 1 and (capability is None or capability < (8, 9))
        self._layer: dict[str, Any] = {
            "NUM_KV_HEADS": shape.num_kv_heads,
            "BLOCK_SIZE": shape.block_size,
            "HEAD_DIM": shape.head_dim,
            "BLOCK_D": block_d,
        }
        queries = {"GROUP": group_size, "UPCAST": capability is None, **self._layer}
        prefill = prefill_tile(block_d, group_size, itemsize, unpacks_fp8=self._unpacks_fp8)
        decode = decode_tile(block_d, group_size, itemsize, shape.kv_dtype.itemsize)
        self._prefill_options = {**queries, **prefill.options}
        self._decode_options = {**queries, **decode.options}
        queries_per_tile = prefill.block_m // group_size
        self._planner = StepPlanner(shape, queries_per_tile=queries_per_tile, device=self._device)
        if capability is not None:
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                self._compile(shape)

    def _compile(self, shape: AttentionShape) -> None:
        """Launches every kernel once: types, windows and divisibility decide what is compiled, not sizes."""
        block_size, context_len = shape.block_size, MIN_SPLIT_LEN + 1
        size = (2, 2, 2, shape.num_kv_heads, block_size, shape.head_dim)
        pool = torch.zeros(size, dtype=shape.dtype, device=self._device).to(shape.kv_dtype)
        num_heads = shape.num_heads + 2 * shape.num_kv_heads
        fused = torch.zeros((4, num_heads, shape.head_dim), dtype=shape.dtype, device=self._device)
        q, kv = fused[:, : shape.num_heads], fused[:, shape.num_heads :]
        # A decode of two splits, one of a single split, and a chunk of two; every block of theirs is block 1.
        self.plan(
            AttentionMetadata(
                num_decodes=2,
                query_start=np.array([0, 1, 2, 4], np.int32),
                context_lens=np.array([context_len, 1, 2], np.int32),
                block_tables=np.ones((3, -(-context_len // block_size)), np.int32),
                slot_mapping=np.full(4, block_size, np.int64),
                positions=np.array([context_len - 1, 0, 0, 1], np.int64),
            )
        )
        layer = pool[:, 1]
        self.write_kv(layer, kv[:, : shape.num_kv_heads], kv[:, shape.num_kv_heads :])
        for window in shape.windows:
            self.attend(q, layer, window=window)
        self._step = None

    # --- a step

    def plan(self, metadata: AttentionMetadata, *, replayed: bool = False) -> None:
        assert self._planner is not None, "plan before prepare"
        self._step = self._planner.plan(metadata, replayed=replayed)

    # --- a layer

    def write_kv(
        self, pool_layer_kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scales: KVScales = UNSCALED
    ) -> None:
        step, block_size = self._step, self._layer["BLOCK_SIZE"]
        assert step is not None, "write_kv before plan"
        # Kernels check no bounds.
        num_slots = len(pool_layer_kv) * block_size
        assert step.largest_slot < num_slots, f"slot {step.largest_slot} in a pool of {num_slots}"
        assert k.stride(2) == v.stride(2) == 1, "a token's key of one head must be contiguous"
        if step.num_tokens == 0:
            return
        if pool_layer_kv.dtype.itemsize == 1:
            pool_layer_kv = pool_layer_kv.view(torch.uint8)
        self._write_kv[(step.num_tokens,)](
            pool_layer_kv,
            self._block_rows(pool_layer_kv),
            k,
            k.stride(0),
            k.stride(1),
            v,
            v.stride(0),
            v.stride(1),
            step.slots,
            scales.k,
            scales.v,
            BLOCK_H=power_of_two(k.shape[1]),
            **self._layer,
        )

    def attend(
        self, q: torch.Tensor, pool_layer_kv: torch.Tensor, *, window: int | None, scales: KVScales = UNSCALED
    ) -> torch.Tensor:
        step, shape = self._step, self._shape
        assert step is not None, "attend before plan"
        assert shape is not None
        assert step.largest_block < len(pool_layer_kv), f"block {step.largest_block} in a pool of {len(pool_layer_kv)}"
        assert q.stride(2) == 1, "a token's query of one head must be contiguous"
        assert window in step.decodes, f"window {window}, prepared for {shape.windows}"
        decodes = step.decodes[window]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._unpacks_fp8:
            pool_layer_kv = pool_layer_kv.view(torch.uint8)
        tensors = (q, q.stride(0), q.stride(1), pool_layer_kv, self._block_rows(pool_layer_kv))
        # Exponents are of base 2. Scales of keys and values are factors of the sums over them.
        numbers = (window or 0, shape.scale * scales.k * math.log2(math.e), scales.v)
        if step.num_tiles > 0:
            self._prefill[(step.num_tiles * shape.num_kv_heads,)](
                out,
                *tensors,
                step.tiles,
                step.tables,
                *numbers,
                HAS_WINDOW=window is not None,
                **self._prefill_options,
            )
        if decodes.num_splits > 0:
            self._decode[(min(decodes.num_splits * shape.num_kv_heads, self._target.num_programs),)](
                out,
                step.partial_out,
                step.partial_stats,
                *tensors,
                decodes.splits,
                step.query_start,
                step.tables,
                *numbers,
                **self._decode_options,
            )
        if decodes.num_merges > 0:
            self._combine[(decodes.num_merges * shape.num_heads,)](
                out,
                step.partial_out,
                step.partial_stats,
                decodes.merges,
                scales.v,
                NUM_HEADS=shape.num_heads,
                HEAD_DIM=shape.head_dim,
                BLOCK_D=self._layer["BLOCK_D"],
                MAX_SPLITS=MAX_SPLITS,
                BLOCK_S=COMBINED_AT_ONCE,
                enable_fp_fusion=True,
            )
        return out

    def _block_rows(self, pool_layer_kv: torch.Tensor) -> int:
        """Rows of head_dim elements from one block to the next; within a block they lie side by side."""
        _, _, num_kv_heads, block_size, head_dim = pool_layer_kv.shape
        block_stride, *inner = pool_layer_kv.stride()
        head_stride = block_size * head_dim
        expected = [num_kv_heads * head_stride, head_stride, head_dim, 1]
        assert inner == expected, f"strides within a block are {inner}, not {expected}"
        block_rows, rest = divmod(block_stride, head_dim)
        assert rest == 0, f"blocks lie {block_stride} elements apart, rows have {head_dim}"
        return block_rows


def _check(shape: AttentionShape, capability: tuple[int, int] | None) -> None:
    if shape.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"attention backend triton computes in float32 or bfloat16, not in {shape.dtype}")
    if shape.kv_dtype not in (shape.dtype, torch.float8_e4m3fn):
        allowed = f"{shape.dtype} or torch.float8_e4m3fn"
        raise ValueError(f"attention backend triton keeps the KV cache in {allowed}, not in {shape.kv_dtype}")
    if not 1 <= shape.head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"attention backend triton takes a head_dim of 1 … {MAX_HEAD_DIM}, not {shape.head_dim}")
    if capability is not None and capability < (8, 0):
        has = ".".join(map(str, capability))
        raise ValueError(f"attention backend triton needs a GPU of compute capability 8.0 or more, not of {has}")

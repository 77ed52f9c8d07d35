"""Attention on a CPU, straight out of the pool.

A request that decodes is attended where its blocks are; for one that brings a chunk of its prompt they are first copied
into one run. Which way a request goes depends on it alone, never on its batch mates, and so does every bit of its
result.
"""

from collections.abc import MutableMapping

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from engine.attention import cpu_copies
from engine.attention.backend import UNSCALED, AttentionMetadata, AttentionShape, KVScales
from engine.attention.cpu_decode import Decode, make_decode
from engine.attention.cpu_plan import StepPlan
from engine.attention.cpu_pool import PoolLayer
from engine.attention.cpu_prefill import Prefill, TorchPrefill, make_prefill
from engine.cpu_code import MAX_THREADS, as_numpy

# Of a layer's keys and values; read in some 30 µs, where waking threads takes 70.
_LEAST_SHARED_BYTES = 512 << 10
_NEVER = 2**31


class CpuBackend:
    """The backend `cpu`. One thread calls it; with `num_threads` above 1 numba's own threads help.

    Args:
        tiles: whether `engine.cpu_tiles` is used where this CPU has it; without, results are those of any CPU.
    """

    can_replay = False

    def __init__(self, *, num_threads: int = 1, device: str = "cpu", tiles: bool = True) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        if device != "cpu":
            raise ValueError(f"attention backend cpu runs on a cpu, not on {device}")
        self._num_threads = min(num_threads, MAX_THREADS)
        self._tiles = tiles
        self._decode: Decode | None = None
        self._prefill: Prefill | None = None
        self._least_shared = _NEVER  # tokens of context
        self._plan: StepPlan | None = None
        # Taking a view apart takes microseconds, and every step does it for every layer twice.
        self._layers: MutableMapping[torch.Tensor, PoolLayer] = WeakTensorKeyDictionary()

    def prepare(self, shape: AttentionShape) -> None:
        if shape.kv_dtype != shape.dtype:
            raise ValueError(f"attention backend cpu keeps the KV cache in {shape.dtype}, not in {shape.kv_dtype}")
        self._decode = make_decode(shape, self._num_threads, tiles=self._tiles)
        self._prefill = make_prefill(shape, self._num_threads, tiles=self._tiles)
        for least_shared in (_NEVER, 0) if self._num_threads > 1 else (_NEVER,):
            self._least_shared = least_shared  # the code for one thread, and that for several
            for window in shape.windows:
                self._warm_up(shape, window)
        bytes_per_token = 2 * shape.num_kv_heads * shape.head_dim * shape.kv_dtype.itemsize
        self._least_shared = -(-_LEAST_SHARED_BYTES // bytes_per_token)

    @property
    def needs_torch_threads(self) -> bool:
        """For chunks, where they are torch's to compute."""
        return isinstance(self._prefill, TorchPrefill)

    def plan(self, metadata: AttentionMetadata, *, replayed: bool = False) -> None:
        assert not replayed, "there are no graphs on a CPU"
        self._plan = StepPlan.of(metadata, self._num_threads, self._least_shared)

    def write_kv(
        self, pool_layer_kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scales: KVScales = UNSCALED
    ) -> None:
        assert self._plan is not None, "write_kv before plan"
        layer = self._layer(pool_layer_kv)
        num_slots = len(pool_layer_kv) * layer.geometry.block_size
        # Nothing below checks bounds, and a pool is shared memory.
        largest = self._plan.largest_slot
        assert largest < num_slots, f"slot {largest} in a pool of {num_slots}"
        cpu_copies.write_kv(layer.kv, as_numpy(k), as_numpy(v), self._plan.metadata.slot_mapping, layer.geometry)

    def attend(
        self, q: torch.Tensor, pool_layer_kv: torch.Tensor, *, window: int | None, scales: KVScales = UNSCALED
    ) -> torch.Tensor:
        plan, decode, prefill = self._plan, self._decode, self._prefill
        assert plan is not None, "attend before plan"
        assert decode is not None, "attend before prepare"
        assert prefill is not None
        assert plan.largest_block < len(pool_layer_kv), f"block {plan.largest_block} in a pool of {len(pool_layer_kv)}"
        layer, query_start = self._layer(pool_layer_kv), plan.metadata.query_start
        if not plan.prefills:
            return decode(q, layer, plan, window)
        if plan.metadata.num_requests == 1:
            return prefill(q, layer, plan, 0, window)
        out = torch.empty(q.shape, dtype=q.dtype)
        if len(plan.decodes) > 0:
            out[plan.decode_rows] = decode(q[plan.decode_rows], layer, plan, window)
        for r in plan.prefills:
            rows = slice(int(query_start[r]), int(query_start[r + 1]))
            out[rows] = prefill(q[rows], layer, plan, r, window)
        return out

    def _layer(self, pool_layer_kv: torch.Tensor) -> PoolLayer:
        layer = self._layers.get(pool_layer_kv)
        if layer is None:
            layer = self._layers[pool_layer_kv] = PoolLayer.of(pool_layer_kv)
        return layer

    def _warm_up(self, shape: AttentionShape, window: int | None) -> None:
        # Types, not sizes, decide what is compiled: one decode and one chunk of two, in blocks 1 and 2.
        pool = torch.zeros((3, 2, shape.num_kv_heads, max(shape.block_size, 2), shape.head_dim), dtype=shape.kv_dtype)
        slots = np.array([1, 2, 3], np.int64) * pool.shape[3]
        slots[2] = slots[1] + 1
        self.plan(
            AttentionMetadata(
                num_decodes=1,
                query_start=np.array([0, 1, 3], np.int32),
                context_lens=np.array([1, 2], np.int32),
                block_tables=np.array([[1], [2]], np.int32),
                slot_mapping=slots,
                positions=np.array([0, 0, 1], np.int64),
            )
        )
        # Views, as a model brings them: to numba, what has gaps is of another type.
        heads = torch.zeros((3, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim), dtype=shape.dtype)
        q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        self.write_kv(pool, k, v)
        self.attend(q, pool, window=window)

"""Attention on a CPU, straight out of the pool.

A request that brings one query (a decode step, or the last token of a prompt) is attended by a numba kernel that walks
its block table: nothing is copied. One that brings a chunk has its keys gathered into one contiguous run, once a layer,
which the many queries of the chunk pay for, and goes to torch's attention. Which way a request goes depends on it
alone, never on its batch mates, and so does every bit of its result.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from engine.attention import cpu_copies, cpu_kernels
from engine.attention.backend import UNSCALED, AttentionMetadata, AttentionShape, KVScales
from engine.attention.cpu_kernels import LayerGeometry
from engine.cpu_code import MAX_THREADS, as_numpy, launch

_NO_WINDOW = 2**62


# Of a chunk's queries so many are attended at once: they see fewer keys than the whole chunk, and those behind are not
# computed. Measured at 512 queries: 1.4 times as fast without a context before them, 1.1 times with 512 tokens.
_QUERIES_PER_TILE = 128


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    """Some queries of a chunk, and the keys that any of them sees."""

    queries: slice
    keys: slice
    mask: torch.Tensor  # [queries, keys]: 0, or -inf where a query does not see a key


@dataclass(frozen=True, slots=True)
class _StepPlan:
    """What all layers of a step share, beyond its metadata."""

    metadata: AttentionMetadata
    decodes: npt.NDArray[np.int64]  # [num_decodes] requests with one query
    decode_rows: slice | torch.Tensor  # their rows of the batch
    decode_tables: npt.NDArray[np.int32]
    decode_contexts: npt.NDArray[np.int32]
    decode_order: npt.NDArray[np.int64]  # in which threads take them
    prefills: list[int]
    largest_slot: int  # read as unsigned, so that a negative one is large
    largest_block: int
    tiles: dict[tuple[int, int | None], list[_Tile]] = field(default_factory=dict)  # by (request, window)


class CpuBackend:
    """The backend `cpu`. One thread calls it; with `num_threads` above 1 numba's own threads help."""

    can_replay = False

    def __init__(self, *, num_threads: int = 1, device: str = "cpu") -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        if device != "cpu":
            raise ValueError(f"attention backend cpu runs on a cpu, not on {device}")
        self._num_threads = min(num_threads, MAX_THREADS)
        self._plan: _StepPlan | None = None
        self._scale = 1.0
        self._gathered = torch.empty(0)  # scratch, reused: fresh memory would cost page faults in every layer

    def plan(self, metadata: AttentionMetadata, *, replayed: bool = False) -> None:
        assert not replayed, "there are no graphs on a CPU"
        self._plan = _plan_step(metadata, self._num_threads)

    def write_kv(
        self, pool_layer_kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scales: KVScales = UNSCALED
    ) -> None:
        assert self._plan is not None, "write_kv before plan"
        geometry = _geometry(pool_layer_kv)
        num_slots = len(pool_layer_kv) * geometry.block_size
        # Nothing below checks bounds, and a pool is shared memory.
        largest = self._plan.largest_slot
        assert largest < num_slots, f"slot {largest} in a pool of {num_slots}"
        # Contiguous: to numba, a view of a fused projection is another type, that is, another kernel to compile.
        k, v = (x.to(pool_layer_kv.dtype).contiguous() for x in (k, v))
        slot_mapping = self._plan.metadata.slot_mapping
        cpu_copies.write_kv(_flat(pool_layer_kv), as_numpy(k), as_numpy(v), slot_mapping, geometry)

    def attend(
        self, q: torch.Tensor, pool_layer_kv: torch.Tensor, *, window: int | None, scales: KVScales = UNSCALED
    ) -> torch.Tensor:
        plan, scale = self._plan, self._scale
        assert plan is not None, "attend before plan"
        metadata = plan.metadata
        assert plan.largest_block < len(pool_layer_kv), f"block {plan.largest_block} in a pool of {len(pool_layer_kv)}"
        geometry, kv = _geometry(pool_layer_kv), _flat(pool_layer_kv)
        if len(plan.decodes) == metadata.num_requests:
            return self._decode(q, kv, plan, geometry, scale, window).to(q.dtype)
        out = torch.empty(q.shape, dtype=q.dtype)
        if len(plan.decodes) > 0:
            out[plan.decode_rows] = self._decode(q[plan.decode_rows], kv, plan, geometry, scale, window)
        for r in plan.prefills:
            rows = slice(int(metadata.query_start[r]), int(metadata.query_start[r + 1]))
            out[rows] = self._prefill(q[rows], pool_layer_kv.dtype, kv, plan, r, geometry, scale, window)
        return out

    def _decode(
        self,
        q: torch.Tensor,
        kv: npt.NDArray[np.generic],
        plan: _StepPlan,
        geometry: LayerGeometry,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        num_requests, num_heads, head_dim = q.shape
        shape = (num_requests, geometry.num_kv_heads, num_heads // geometry.num_kv_heads, head_dim)
        out = torch.empty(q.shape, dtype=torch.float32)
        arguments = (
            q.to(torch.float32).contiguous().view(shape).numpy(),
            kv,
            plan.decode_tables,
            plan.decode_contexts,
            _NO_WINDOW if window is None else window,
            np.float32(scale),
            geometry,
            out.view(shape).numpy(),
        )
        if self._num_threads == 1:
            cpu_kernels.decode_attention(*arguments)
            return out
        # With many requests a task is a request, whose block is then read in one run; with few, one of its KV heads.
        heads_per_task = geometry.num_kv_heads if num_requests >= 4 * self._num_threads else 1
        with launch(self._num_threads):
            cpu_kernels.decode_attention_parallel(*arguments, plan.decode_order, heads_per_task)
        return out

    def _prefill(
        self,
        q: torch.Tensor,
        dtype: torch.dtype,
        kv: npt.NDArray[np.generic],
        plan: _StepPlan,
        r: int,
        geometry: LayerGeometry,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        num_queries, context_len = len(q), int(plan.metadata.context_lens[r])
        if window is not None and window >= context_len:
            window = None
        first_key = 0 if window is None else max(0, context_len - num_queries - window + 1)
        num_keys = context_len - first_key

        shape = (2, geometry.num_kv_heads, num_keys, geometry.head_dim)
        size = 2 * geometry.num_kv_heads * num_keys * geometry.head_dim
        if self._gathered.dtype != dtype or len(self._gathered) < size:
            self._gathered = torch.empty(size, dtype=dtype)
        gathered = self._gathered[:size].view(shape)
        cpu_copies.gather_kv(kv, plan.metadata.block_tables[r], first_key, geometry, as_numpy(gathered))

        tiles = plan.tiles.get((r, window))
        if tiles is None:
            tiles = plan.tiles[r, window] = _tiles(num_queries, num_keys, window, dtype)
        # Contiguous: the last bit of a product may depend on its operands' alignment, which batch mates shift.
        q = q.to(dtype).transpose(0, 1).contiguous()
        attended = [
            F.scaled_dot_product_attention(
                q[None, :, tile.queries],
                gathered[None, 0, :, tile.keys],
                gathered[None, 1, :, tile.keys],
                attn_mask=tile.mask,
                scale=scale,
                enable_gqa=True,
            )[0]
            for tile in tiles
        ]
        return (attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)).transpose(0, 1)

    def prepare(self, shape: AttentionShape) -> None:
        if shape.kv_dtype != shape.dtype:
            raise ValueError(f"attention backend cpu keeps the KV cache in {shape.dtype}, not in {shape.kv_dtype}")
        self._scale = shape.scale
        for window in shape.windows:
            self._warm_up(shape, window)

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
        k = torch.zeros((3, shape.num_kv_heads, shape.head_dim), dtype=shape.dtype)
        self.write_kv(pool, k, k)
        self.attend(torch.zeros((3, shape.num_heads, shape.head_dim), dtype=shape.dtype), pool, window=window)


def _plan_step(metadata: AttentionMetadata, num_threads: int) -> _StepPlan:
    query_lens = np.diff(metadata.query_start)
    decodes = np.flatnonzero(query_lens == 1)
    decode_rows: slice | torch.Tensor
    if len(decodes) == metadata.num_decodes:  # the usual case: they are all at the front
        decode_rows = slice(0, len(decodes))
        tables, contexts = metadata.block_tables[: len(decodes)], metadata.context_lens[: len(decodes)]
    else:
        decode_rows = torch.from_numpy(metadata.query_start[decodes].astype(np.int64))
        tables, contexts = metadata.block_tables[decodes], metadata.context_lens[decodes]
    # Threads take equal runs of the order: deal them long and short contexts alike.
    by_length = np.argsort(-contexts, kind="stable")
    return _StepPlan(
        metadata=metadata,
        decodes=decodes,
        decode_rows=decode_rows,
        decode_tables=np.ascontiguousarray(tables),
        decode_contexts=np.ascontiguousarray(contexts),
        decode_order=np.concatenate([by_length[t::num_threads] for t in range(num_threads)]),
        prefills=np.flatnonzero(query_lens > 1).tolist(),
        largest_slot=int(metadata.slot_mapping.view(np.uint64).max(initial=0)),
        largest_block=int(metadata.block_tables.view(np.uint32).max(initial=0)),
    )


def _tiles(num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype) -> list[_Tile]:
    """Cuts a chunk whose last query is at the last key's position."""
    tiles = []
    for start in range(0, num_queries, _QUERIES_PER_TILE):
        stop = min(start + _QUERIES_PER_TILE, num_queries)
        end = num_keys - num_queries + stop  # the last query of the tile sees keys below
        first = 0 if window is None else max(0, end - (stop - start) - window + 1)
        hidden = torch.ones((stop - start, end - first), dtype=torch.bool)
        hidden = hidden.triu(end - first - (stop - start) + 1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(end - first - (stop - start) - window)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        tiles.append(_Tile(slice(start, stop), slice(first, end), mask))
    return tiles


def _geometry(pool_layer_kv: torch.Tensor) -> LayerGeometry:
    _, _, num_kv_heads, block_size, head_dim = pool_layer_kv.shape
    block_stride, side_stride, head_stride, token_stride, element_stride = pool_layer_kv.stride()
    assert (token_stride, element_stride) == (head_dim, 1), (
        f"a head's rows must be contiguous, not {token_stride} apart"
    )
    return LayerGeometry(block_size, num_kv_heads, head_dim, block_stride, side_stride, head_stride)


def _flat(pool_layer_kv: torch.Tensor) -> npt.NDArray[np.generic]:
    """The layer as one flat array, from its first element to its last; other layers lie in between."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(pool_layer_kv.shape, pool_layer_kv.stride(), strict=True))
    return as_numpy(pool_layer_kv.as_strided((span,), (1,)))

"""Attention of a chunk of a request's queries on a CPU, two ways: torch's, and by `engine.cpu_tiles`.

Both first copy the keys and values that the chunk sees out of their blocks, once a layer, which the many queries of the
chunk pay for.
"""

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention import cpu_copies, cpu_tiled_prefill
from engine.attention.backend import AttentionShape
from engine.attention.cpu_decode import NO_WINDOW
from engine.attention.cpu_plan import MaskedTile, StepPlan
from engine.attention.cpu_pool import PoolLayer
from engine.cpu_code import as_numpy, launch
from engine.cpu_tiles import TILE_COLUMNS, has_tiles


class Prefill(Protocol):
    """q, of request `r`: [num_queries, num_heads, head_dim] -> the same shape and dtype."""

    def __call__(
        self, q: torch.Tensor, layer: PoolLayer, plan: StepPlan, r: int, window: int | None
    ) -> torch.Tensor: ...


def make_prefill(shape: AttentionShape, num_threads: int, *, tiles: bool) -> Prefill:
    """The faster one."""
    if tiles and has_tiles(shape.dtype) and shape.head_dim % TILE_COLUMNS == 0:
        return TiledPrefill(shape.scale, num_threads)
    return TorchPrefill(shape.scale)


class TiledPrefill:
    """By `cpu_tiled_prefill`. How a prompt is cut into chunks changes no bit of a query's result."""

    def __init__(self, scale: float, num_threads: int) -> None:
        self._scale, self._num_threads = np.float32(scale), num_threads
        self._scratch = _Scratch()

    def __call__(self, q: torch.Tensor, layer: PoolLayer, plan: StepPlan, r: int, window: int | None) -> torch.Tensor:
        num_queries, context_len = len(q), int(plan.metadata.context_lens[r])
        geometry = layer.geometry
        visible = NO_WINDOW if window is None else window
        first_visible = max(0, context_len - num_queries - visible + 1)
        first = first_visible // TILE_COLUMNS * TILE_COLUMNS
        panels, width = -(-(context_len - first) // TILE_COLUMNS), 4 // q.itemsize
        heads, head_dim = geometry.num_kv_heads, geometry.head_dim
        num_words = heads * panels * TILE_COLUMNS * head_dim // width
        words = self._scratch.get(2 * num_words, torch.int32).numpy().view(np.uint32)
        keys = words[:num_words].reshape(heads, panels, head_dim // width, TILE_COLUMNS)
        values = words[num_words:].reshape(heads, head_dim // TILE_COLUMNS, -1, TILE_COLUMNS)
        rows = plan.rows(geometry)
        start = rows.starts[r]
        positions = rows.rows[start + first : start + context_len]
        kv = layer.kv if width == 2 else layer.kv.view(np.uint32)
        cpu_tiled_prefill.pack_kv(kv, positions, first_visible - first, geometry, keys, values)
        out = torch.empty(q.shape, dtype=q.dtype)
        arguments = (
            as_numpy(q.contiguous()), context_len - num_queries - first, keys, values, visible, self._scale,
            as_numpy(out),
        )  # fmt: skip
        if self._num_threads == 1:
            cpu_tiled_prefill.chunk_attention(*arguments)
        else:
            with launch(self._num_threads):
                cpu_tiled_prefill.chunk_attention_parallel(*arguments)
        return out


# Of a chunk's queries so many are attended at once: they see fewer keys than the whole chunk, and those behind are not
# computed. Measured at 512 queries: 1.4 times as fast without a context before them, 1.1 times with 512 tokens.
_QUERIES_PER_TILE = 128


class TorchPrefill:
    """By torch's attention, over keys and values in a row."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._scratch = _Scratch()

    def __call__(self, q: torch.Tensor, layer: PoolLayer, plan: StepPlan, r: int, window: int | None) -> torch.Tensor:
        num_queries, context_len = len(q), int(plan.metadata.context_lens[r])
        if window is not None and window >= context_len:
            window = None
        first_key = 0 if window is None else max(0, context_len - num_queries - window + 1)
        num_keys = context_len - first_key

        shape = (2, layer.geometry.num_kv_heads, num_keys, layer.geometry.head_dim)
        gathered = self._scratch.get(torch.Size(shape).numel(), layer.dtype).view(shape)
        table = plan.metadata.block_tables[r]
        cpu_copies.gather_kv(layer.kv, table, first_key, layer.geometry, as_numpy(gathered))
        # Contiguous: the last bit of a product may depend on its operands' alignment, which batch mates shift.
        q = q.to(layer.dtype).transpose(0, 1).contiguous()
        tiles = plan.masked_tiles.get((r, window))
        if tiles is None:
            tiles = plan.masked_tiles[r, window] = _masked_tiles(num_queries, num_keys, window, layer.dtype)
        attended = [
            F.scaled_dot_product_attention(
                q[None, :, tile.queries],
                gathered[None, 0, :, tile.keys],
                gathered[None, 1, :, tile.keys],
                attn_mask=tile.mask,
                scale=self._scale,
                enable_gqa=True,
            )[0]
            for tile in tiles
        ]
        return (attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)).transpose(0, 1)


def _masked_tiles(num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype) -> list[MaskedTile]:
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
        tiles.append(MaskedTile(slice(start, stop), slice(first, end), mask))
    return tiles


class _Scratch:
    """Memory used again by every layer: fresh memory would cost page faults in each."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def get(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """[size]"""
        if self._memory.dtype != dtype or len(self._memory) < size:
            self._memory = torch.empty(size, dtype=dtype)
        return self._memory[:size]

"""Attention of requests with one query each on a CPU, two ways: for any CPU, and by `engine.cpu_tiles`."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from engine.attention import cpu_kernels, cpu_tiled_decode
from engine.attention.backend import AttentionShape
from engine.attention.cpu_plan import StepPlan
from engine.attention.cpu_pool import PoolLayer
from engine.cpu_code import as_numpy, launch
from engine.cpu_tiles import TILE_COLUMNS, has_tiles

NO_WINDOW = 2**62


class Decode(Protocol):
    """q, of the plan's decodes: [num_decodes, num_heads, head_dim] -> the same shape and dtype."""

    def __call__(self, q: torch.Tensor, layer: PoolLayer, plan: StepPlan, window: int | None) -> torch.Tensor: ...


def make_decode(shape: AttentionShape, num_threads: int, *, tiles: bool) -> Decode:
    """The faster one. In float32 both wait for memory."""
    if tiles and shape.dtype == torch.bfloat16 and has_tiles(shape.dtype) and shape.head_dim % TILE_COLUMNS == 0:
        return TiledDecode(shape.scale, num_threads)
    return PortableDecode(shape.scale, num_threads)


class PortableDecode:
    """By `cpu_kernels`."""

    def __init__(self, scale: float, num_threads: int) -> None:
        self._scale, self._num_threads = np.float32(scale), num_threads

    def __call__(self, q: torch.Tensor, layer: PoolLayer, plan: StepPlan, window: int | None) -> torch.Tensor:
        shape = _by_kv_head(q, layer)
        out = torch.empty(shape)
        arguments = (
            q.to(torch.float32).contiguous().view(shape).numpy(),
            layer.kv,
            plan.decode_tables,
            plan.decode_contexts,
            NO_WINDOW if window is None else window,
            self._scale,
            layer.geometry,
            out.numpy(),
        )
        one, several = cpu_kernels.decode_attention, cpu_kernels.decode_attention_parallel
        _run(one, several, arguments, layer, plan, self._num_threads)
        return out.view(q.shape).to(q.dtype)


class TiledDecode:
    """By `cpu_tiled_decode`."""

    def __init__(self, scale: float, num_threads: int) -> None:
        self._scale, self._num_threads = np.float32(scale), num_threads

    def __call__(self, q: torch.Tensor, layer: PoolLayer, plan: StepPlan, window: int | None) -> torch.Tensor:
        shape = _by_kv_head(q, layer)
        out = q.new_empty(shape)
        rows = plan.rows(layer.geometry)
        arguments = (
            as_numpy(q.contiguous().view(shape)),
            layer.kv,
            rows.rows,
            rows.decode_starts,
            plan.decode_contexts,
            NO_WINDOW if window is None else window,
            self._scale,
            layer.geometry,
            as_numpy(out),
        )
        one, several = cpu_tiled_decode.decode_attention, cpu_tiled_decode.decode_attention_parallel
        _run(one, several, arguments, layer, plan, self._num_threads)
        return out.view(q.shape)


def _by_kv_head(q: torch.Tensor, layer: PoolLayer) -> tuple[int, int, int, int]:
    num_requests, num_heads, head_dim = q.shape
    num_kv_heads = layer.geometry.num_kv_heads
    return num_requests, num_kv_heads, num_heads // num_kv_heads, head_dim


def _run(
    one: Callable[..., None],
    several: Callable[..., None],
    arguments: tuple[object, ...],
    layer: PoolLayer,
    plan: StepPlan,
    num_threads: int,
) -> None:
    """Each request by the kernel for one thread or by that for several, as the plan says."""
    if len(plan.alone) > 0:
        one(*arguments, plan.alone)
    if len(plan.shared) > 0:
        # With many requests a task is a request, whose blocks are then read in one run; with few, one of its KV heads.
        heads_per_task = layer.geometry.num_kv_heads if len(plan.shared) >= 4 * num_threads else 1
        with launch(num_threads):
            several(*arguments, plan.shared, heads_per_task)

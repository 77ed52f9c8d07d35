"""FlashInfer without a GPU: the parts of it that Tandem calls, with its documented meanings, in plain torch.

Names and order of parameters are those of FlashInfer 0.7.4 (decode.py, prefill.py, page.py). What the real one takes
from memory without looking (a query of another type, a page that is not there) is refused here in words.

A wrapper for CUDA graphs reads its own buffers, not the arguments of `plan`.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from fake_flashinfer_kernels import Plan, attended

WORKSPACE_BYTES = 128 << 20


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Makes `import flashinfer` find this, with its kernels ready, until the test ends."""
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    module.append_paged_kv_cache = append_paged_kv_cache  # type: ignore[attr-defined]
    kernels = ModuleType("flashinfer_jit_cache")
    kernels.__spec__ = ModuleSpec("flashinfer_jit_cache", None)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer_jit_cache", kernels)
    return module


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    assert kv_layout == "HND", kv_layout
    k_cache, v_cache = _unpacked(paged_kv_cache)
    num_tokens, (num_pages, num_kv_heads, page_size, head_dim) = len(append_key), k_cache.shape
    assert head_dim in (64, 128, 256, 512), head_dim
    for appended in (append_key, append_value):
        assert appended.shape == (num_tokens, num_kv_heads, head_dim), appended.shape
        assert appended.stride(-1) == 1
        assert appended.dtype == k_cache.dtype, "would be read as if it were of the cache's type"
        assert appended.device == k_cache.device
    assert k_cache.dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    for indices in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        _check_ints(indices, device=k_cache.device)
    assert len(batch_indices) == len(positions) == num_tokens
    assert len(kv_indptr) == len(kv_last_page_len) + 1
    for i, (request, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        page = int(kv_indptr[request]) + position // page_size
        assert page < int(kv_indptr[request + 1]), f"no page was allocated for position {position}"
        block_id = int(kv_indices[page])
        assert 0 <= block_id < num_pages, block_id
        k_cache[block_id, :, position % page_size] = append_key[i]
        v_cache[block_id, :, position % page_size] = append_value[i]


class _Wrapper:
    def __init__(self, workspace: torch.Tensor, kv_layout: str, use_cuda_graph: bool, backend: str) -> None:
        assert kv_layout == "HND", kv_layout
        assert backend == "fa2", "other backends switch kernels and rules"
        self.device = workspace.device
        self.reset_workspace_buffer(workspace, torch.empty(8 << 20, dtype=torch.uint8, device=self.device))
        self._use_cuda_graph = use_cuda_graph
        self._plan: Plan | None = None
        self._indptr = self._indices = self._last_page_len = torch.empty(0, dtype=torch.int32)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        for buffer in (float_workspace_buffer, int_workspace_buffer):
            assert buffer.data_ptr() % 16 == 0
            assert buffer.device == self.device
            assert buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= WORKSPACE_BYTES
        assert not float_workspace_buffer[:4096].any(), "must be zero at first use"
        self._int_workspace_bytes = int_workspace_buffer.numel()

    def _take_in(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, size: int) -> None:
        for host in (indptr, last_page_len):
            _check_ints(host, device=torch.device("cpu"))  # else `plan` waits for the GPU
        _check_ints(indices, device=self.device)
        assert len(indptr) == size + 1
        assert len(last_page_len) == size > 0
        assert indptr[0] == 0
        assert indptr[-1] == len(indices)
        assert (indptr.diff() > 0).all()
        if not self._use_cuda_graph:
            self._indptr, self._indices, self._last_page_len = indptr.clone(), indices, last_page_len.clone()
            return
        if size != len(self._last_page_len):
            raise ValueError(f"a graph of {len(self._last_page_len)} requests is planned for {size}")
        if len(indices) > len(self._indices):
            raise ValueError(f"{len(indices)} indices for a buffer of {len(self._indices)}")
        self._indptr.copy_(indptr)
        self._last_page_len.copy_(last_page_len)
        self._indices[: len(indices)].copy_(indices)

    def _set_plan(
        self,
        qo_indptr: list[int],
        heads: tuple[int, int, int, int],
        causal: bool,
        options: dict[str, Any],
        head_dims: tuple[int, ...],
    ) -> None:
        num_qo_heads, num_kv_heads, head_dim, _ = heads
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim in head_dims, f"there is no kernel for head_dim {head_dim}"
        q_data_type, kv_data_type = options["q_data_type"], options["kv_data_type"]
        assert q_data_type in (torch.float16, torch.bfloat16), f"there is no kernel for {q_data_type}"
        assert kv_data_type in (q_data_type, torch.float8_e4m3fn, torch.float8_e5m2)
        assert options["window_left"] >= -1
        size = len(qo_indptr) - 1
        rows = qo_indptr[-1] * (num_qo_heads // num_kv_heads) // size
        splits_itself = options["fixed_split_size"] is None and not options["disable_split_kv"]
        assert options["fixed_split_size"] is None, "not played here"
        self._plan = Plan(
            *heads,
            causal,
            options["window_left"],
            options["sm_scale"],
            q_data_type,
            kv_data_type,
            options["o_data_type"] or q_data_type,
            qo_indptr,
            tile_rows=16 if rows <= 16 else 64 if rows <= 64 or head_dim >= 256 else 128,
            num_splits=max(1, 8 // size) if splits_itself else 1,
        )

    def _run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        scales: tuple[float | None, float | None, float | None],
        out: torch.Tensor | None,
        window_left: int | None,
    ) -> torch.Tensor:
        plan = self._plan
        assert plan is not None, "run before plan"
        k_cache, v_cache = _unpacked(paged_kv_cache)
        assert q.device == k_cache.device == self.device
        if q.dtype != plan.q_data_type or k_cache.dtype != plan.kv_data_type:
            raise ValueError(f"planned for {plan.q_data_type} over {plan.kv_data_type}, not {q.dtype}, {k_cache.dtype}")
        if len(q) != plan.qo_indptr[-1]:
            raise ValueError(f"planned for {plan.qo_indptr[-1]} queries, not {len(q)}")
        assert q.shape[1:] == (plan.num_qo_heads, plan.head_dim)
        assert q.stride(-1) == 1
        assert k_cache.shape[1:] == (plan.num_kv_heads, plan.page_size, plan.head_dim), k_cache.shape
        assert window_left in (None, plan.window_left)
        if out is None:
            out = torch.empty(q.shape, dtype=plan.o_data_type, device=q.device)
        assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, plan.o_data_type, True)
        q_scale, k_scale, v_scale = (1.0 if scale is None else scale for scale in scales)
        scale = (plan.head_dim**-0.5 if plan.sm_scale is None else plan.sm_scale) * q_scale * k_scale
        indptr, indices = self._indptr.tolist(), self._indices.tolist()
        for r, (start, end) in enumerate(zip(plan.qo_indptr[:-1], plan.qo_indptr[1:], strict=True)):
            pages = indices[indptr[r] : indptr[r + 1]]
            kv_len = (len(pages) - 1) * plan.page_size + int(self._last_page_len[r])
            assert all(0 <= page < len(k_cache) for page in pages), pages
            assert 0 < int(self._last_page_len[r]) <= plan.page_size
            k, v = (cache[pages].transpose(0, 1).flatten(1, 2)[:, :kv_len] for cache in (k_cache, v_cache))
            out[start:end] = attended(q[start:end], k, v, scale, plan)
        if v_scale != 1.0:
            out *= v_scale
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        assert use_tensor_cores, "without, only some group sizes are served"
        assert jit_args is jit_kwargs is None
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        if use_cuda_graph:
            buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            for buffer in buffers:
                assert buffer is not None
                _check_ints(buffer, device=self.device)
            self._indptr, self._indices, self._last_page_len = buffers  # type: ignore[assignment]
            assert len(self._indptr) == len(self._last_page_len) + 1

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        assert not deprecated_positional_args
        assert "q_data_type" in kwargs, "defaults to float16"
        self._plan_impl(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)

    def _plan_impl(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        options = {k: v for k, v in locals().items() if k in _OPTIONS} | {"kv_data_type": kv_data_type or q_data_type}
        size = len(last_page_len)
        self._take_in(indptr, indices, last_page_len, size)
        heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._set_plan(list(range(size + 1)), heads, False, options, (64, 128, 192, 256))

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert not args
        assert not return_lse
        return self._run(q, paged_kv_cache, (q_scale, k_scale, v_scale), out, window_left)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        assert not use_cuda_graph, "not played here"
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        assert causal
        options = {k: v for k, v in locals().items() if k in _OPTIONS} | {"kv_data_type": kv_data_type or q_data_type}
        _check_ints(qo_indptr, device=torch.device("cpu"))
        assert qo_indptr[0] == 0
        self._take_in(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, len(qo_indptr) - 1)
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._set_plan(qo_indptr.tolist(), heads, True, options, (64, 128, 192, 256))

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> torch.Tensor:
        assert not args
        assert not return_lse
        return self._run(q, paged_kv_cache, (q_scale, k_scale, v_scale), out, window_left)


# The options of `plan` that mean something here; others must be left alone.
_OPTIONS = (
    "window_left",
    "sm_scale",
    "q_data_type",
    "kv_data_type",
    "o_data_type",
    "fixed_split_size",
    "disable_split_kv",
)


def _unpacked(paged_kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_pages, num_kv_heads, page_size, head_dim] of keys and of values, from [num_pages, 2, …]."""
    assert paged_kv_cache.ndim == 5, paged_kv_cache.shape
    assert paged_kv_cache.shape[1] == 2, paged_kv_cache.shape
    k_cache, v_cache = paged_kv_cache.unbind(dim=1)
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride(-1) == 1
    return k_cache, v_cache


def _check_ints(indices: torch.Tensor, *, device: torch.device) -> None:
    assert indices.dtype == torch.int32, indices.dtype
    assert indices.ndim == 1
    assert indices.is_contiguous()
    assert indices.device == device, f"on {indices.device}, must be on {device}"

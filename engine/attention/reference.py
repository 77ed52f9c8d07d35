"""The reference: gather each request's keys and values out of the pool, then torch's own attention.

Slow and plain on purpose: it is what every other backend is measured against, and runs on any device and dtype.
"""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionMetadata


class ReferenceBackend:
    """Torch gather + scaled dot product attention, one request after the other."""

    def __init__(self, *, num_threads: int = 1) -> None:
        del num_threads  # torch's own setting holds

    def write_kv(
        self, pool_layer_kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: npt.NDArray[np.int64]
    ) -> None:
        block_size = pool_layer_kv.shape[3]
        slots = torch.from_numpy(slot_mapping).to(pool_layer_kv.device)
        block_ids, offsets = slots // block_size, slots % block_size
        pool_layer_kv[block_ids, 0, :, offsets] = k.to(pool_layer_kv.dtype)
        pool_layer_kv[block_ids, 1, :, offsets] = v.to(pool_layer_kv.dtype)

    def attend(
        self,
        q: torch.Tensor,
        pool_layer_kv: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        _, _, num_kv_heads, block_size, _ = pool_layer_kv.shape
        group_size = q.shape[1] // num_kv_heads
        out = torch.empty_like(q)
        for r in range(metadata.num_requests):
            rows = slice(int(metadata.query_start[r]), int(metadata.query_start[r + 1]))
            context_len = int(metadata.context_lens[r])
            query_positions = torch.arange(context_len - (rows.stop - rows.start), context_len, device=q.device)
            # Keys that left the window may be in blocks given back since: not even gathered.
            first_key = 0 if window is None else max(0, int(query_positions[0]) - window + 1)
            key_positions = torch.arange(first_key, context_len, device=q.device)

            table = torch.from_numpy(metadata.block_tables[r]).to(q.device).long()
            block_ids, offsets = table[key_positions // block_size], key_positions % block_size
            # [num_keys, num_kv_heads, head_dim] -> [num_heads, num_keys, head_dim]
            k, v = (
                pool_layer_kv[block_ids, side, :, offsets]
                .transpose(0, 1)
                .repeat_interleave(group_size, dim=0)
                .to(q.dtype)
                for side in (0, 1)
            )
            distance = query_positions[:, None] - key_positions[None, :]
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            # Unbatched 3-d operands would be read as [batch, length, dim] by some kernels: say the batch.
            attended = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None], k[None], v[None], attn_mask=visible, scale=scale
            )
            out[rows] = attended[0].transpose(0, 1)
        return out

    def warm_up(
        self,
        *,
        dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        window: int | None = None,
    ) -> None:
        """Nothing to compile."""

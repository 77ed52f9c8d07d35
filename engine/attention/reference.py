"""The reference: gather each request's keys and values out of the pool, then torch's own attention.

Slow and plain on purpose: it is what every other backend is measured against, and runs on any device and dtype.
"""

import torch
import torch.nn.functional as F

from engine.attention.backend import UNSCALED, AttentionMetadata, AttentionShape, KVScales
from engine.attention.stored import computed, stored


class ReferenceBackend:
    """Torch gather + scaled dot product attention, one request after the other."""

    can_replay = False
    needs_torch_threads = True

    def __init__(self, *, num_threads: int = 1, device: str = "cpu") -> None:
        del num_threads, device  # torch's own setting, and its tensors' device, hold
        self._scale: float | None = None
        self._metadata: AttentionMetadata | None = None

    def prepare(self, shape: AttentionShape) -> None:
        """Nothing to compile."""
        self._scale = shape.scale

    def plan(self, metadata: AttentionMetadata, *, replayed: bool = False) -> None:
        assert not replayed, "nothing here lies still"
        self._metadata = metadata

    def write_kv(
        self, pool_layer_kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scales: KVScales = UNSCALED
    ) -> None:
        assert self._metadata is not None, "write_kv before plan"
        block_size = pool_layer_kv.shape[3]
        slots = torch.from_numpy(self._metadata.slot_mapping).to(pool_layer_kv.device)
        block_ids, offsets = slots // block_size, slots % block_size
        for side, rows, scale in ((0, k, scales.k), (1, v, scales.v)):
            pool_layer_kv[block_ids, side, :, offsets] = stored(rows, pool_layer_kv.dtype, scale)

    def attend(
        self, q: torch.Tensor, pool_layer_kv: torch.Tensor, *, window: int | None, scales: KVScales = UNSCALED
    ) -> torch.Tensor:
        metadata = self._metadata
        assert metadata is not None, "attend before plan"
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
                computed(pool_layer_kv[block_ids, side, :, offsets], q.dtype, scale)
                .transpose(0, 1)
                .repeat_interleave(group_size, dim=0)
                for side, scale in ((0, scales.k), (1, scales.v))
            )
            distance = query_positions[:, None] - key_positions[None, :]
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            # Unbatched 3-d operands would be read as [batch, length, dim] by some kernels: say the batch.
            attended = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None], k[None], v[None], attn_mask=visible, scale=self._scale
            )
            out[rows] = attended[0].transpose(0, 1)
        return out

"""How FlashInfer's kernels attend, with the habits that a caller must know of, so that a test sees who does not.

- Rows (queries times heads of a KV head) are computed in tiles, whose size follows from the average number of rows of
  the call's requests; how many keys are taken at once follows from the size; and weights are rounded to 16 bits.
- Unless told otherwise, a context is split in a number of pieces that depends on how many requests there are, and each
  piece's result is rounded before they are added up.
- A tile reads all keys that any of its queries sees, and the window of the first one decides where it begins.
"""

from dataclasses import dataclass

import torch


@dataclass
class Plan:
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    causal: bool
    window_left: int
    sm_scale: float | None
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    o_data_type: torch.dtype
    qo_indptr: list[int]  # the planner's own copy
    tile_rows: int
    num_splits: int


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, plan: Plan) -> torch.Tensor:
    """One request. q: [num_queries, num_qo_heads, head_dim]; k, v: [num_kv_heads, kv_len, head_dim]."""
    num_queries, kv_len = len(q), k.shape[1]
    group_size = plan.num_qo_heads // plan.num_kv_heads
    # [num_kv_heads, rows, head_dim], a query's heads together
    packed = q.view(num_queries, plan.num_kv_heads, group_size, -1).transpose(0, 1).flatten(1, 2)
    out = torch.empty(packed.shape, dtype=plan.o_data_type)
    for first in range(0, packed.shape[1], plan.tile_rows):
        rows = slice(first, min(first + plan.tile_rows, packed.shape[1]))
        positions = kv_len - num_queries + torch.arange(rows.start, rows.stop) // group_size
        start = 0 if plan.window_left < 0 else max(0, int(positions[0]) - plan.window_left)
        length = -(-(kv_len - start) // plan.num_splits)
        pieces = [
            _piece(packed[:, rows], k, v, range(a, min(a + length, kv_len)), positions, scale, plan)
            for a in range(start, kv_len, length)
        ]
        if len(pieces) == 1:
            out[:, rows] = pieces[0][0]
            continue
        lse = torch.stack([lse for _, lse in pieces])
        weights = torch.softmax(lse, 0)
        out[:, rows] = sum(o.float() * w[..., None] for (o, _), w in zip(pieces, weights, strict=True)).to(out.dtype)
    return out.view(plan.num_kv_heads, num_queries, group_size, -1).transpose(0, 1).flatten(1, 2)


def _piece(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: range,
    positions: torch.Tensor,
    scale: float,
    plan: Plan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, log of the sum of weights) of some keys: [num_kv_heads, rows, head_dim], [num_kv_heads, rows]."""
    shape = q.shape[:2]
    largest, total = torch.full(shape, -torch.inf), torch.zeros(shape)
    sums = torch.zeros(q.shape)
    step = 2048 // plan.tile_rows
    for a in range(keys.start, keys.stop, step):
        columns = torch.arange(a, min(a + step, keys.stop))
        scores = q.float() @ k[:, columns].float().transpose(1, 2) * scale
        distance = positions[:, None] - columns
        hidden = torch.zeros(distance.shape, dtype=torch.bool)
        if plan.causal:
            hidden |= distance < 0
        if plan.window_left >= 0:
            hidden |= distance > plan.window_left
        scores = scores.masked_fill(hidden, -torch.inf)
        peak = torch.maximum(largest, scores.amax(-1))
        base = torch.where(peak == -torch.inf, 0.0, peak)
        weights = torch.exp(scores - base[..., None])
        shrunk = torch.exp(largest - base)
        total = total * shrunk + weights.sum(-1)
        sums = sums * shrunk[..., None] + weights.to(plan.q_data_type).float() @ v[:, columns].float()
        largest = peak
    return (sums / total[..., None]).to(plan.o_data_type), largest + torch.log(total)

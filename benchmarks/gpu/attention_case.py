"""A step of attention to compare backends on: ragged contexts, in blocks that lie anywhere."""

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.backend import (
    UNSCALED,
    AttentionBackend,
    AttentionMetadata,
    AttentionShape,
    KVScales,
    build_metadata,
)
from engine.executor import ScheduledRequest


@dataclass(frozen=True, slots=True)
class Case:
    """What is computed. `lengths`: of each request, (tokens computed before, tokens of this step)."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None  # None: dtype
    scales: KVScales = UNSCALED

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype or self.dtype,
            scale=self.head_dim**-0.5,
            windows=frozenset({self.window}),
            max_context_len=max(sum(length) for length in self.lengths),
        )


class Step:
    """The case's tensors on a device; the pool has two layers, and the second is looked at."""

    def __init__(self, case: Case, device: str, seed: int = 0) -> None:
        self.case = case
        generator = torch.Generator(device).manual_seed(seed)
        needed = [-(-(before + new) // case.block_size) for before, new in case.lengths]
        num_blocks = 1 + sum(needed)
        free = (np.random.default_rng(seed).permutation(num_blocks - 1) + 1).tolist()
        requests = [
            ScheduledRequest(str(r), [0] * new, before, ([free.pop() for _ in range(count)],), None)
            for r, ((before, new), count) in enumerate(zip(case.lengths, needed, strict=True))
        ]
        self.metadata: AttentionMetadata = build_metadata(requests, block_size=case.block_size)
        shape = (num_blocks, 2, 2, case.num_kv_heads, case.block_size, case.head_dim)
        pool = torch.randn(shape, generator=generator, device=device).to(case.dtype)
        self.pool = pool.to(case.kv_dtype or case.dtype)
        num_tokens = self.metadata.num_tokens
        # Views of one fused projection, as the model has them.
        fused = torch.randn(
            (num_tokens, case.num_heads + 2 * case.num_kv_heads, case.head_dim), generator=generator, device=device
        ).to(case.dtype)
        sizes = [case.num_heads, case.num_kv_heads, case.num_kv_heads]
        self.q, self.k, self.v = torch.split(fused, sizes, dim=1)

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """Writes and attends; returns [num_tokens, num_heads, head_dim]."""
        backend.plan(self.metadata)
        self.write(backend)
        return self.attend(backend)

    def write(self, backend: AttentionBackend) -> None:
        backend.write_kv(self.pool[:, 1], self.k, self.v, scales=self.case.scales)

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        return backend.attend(self.q, self.pool[:, 1], window=self.case.window, scales=self.case.scales)


FP8 = torch.float8_e4m3fn
_RAGGED = ((0, 1), (14, 1), (15, 1), (16, 1), (500, 1), (1023, 1), (0, 17), (33, 64), (256, 200))

CASES = (
    Case("bf16 d64 g4", _RAGGED, 16, 4, 64),
    Case("bf16 d128 g4", _RAGGED, 32, 8, 128),
    Case("bf16 d128 g8 b32", _RAGGED, 16, 2, 128, block_size=32),
    Case("bf16 d64 g3", _RAGGED, 9, 3, 64),
    Case("bf16 d128 g7", _RAGGED, 28, 4, 128),
    Case("bf16 d128 g1", _RAGGED, 8, 8, 128),
    Case("bf16 d128 window 100", _RAGGED, 32, 8, 128, window=100),
    Case("bf16 d64 window 16 b32", _RAGGED, 8, 2, 64, block_size=32, window=16),
    Case("bf16 d128 8k", ((8191, 1), (4000, 300)), 32, 8, 128),
    Case("fp8 d128 g4", _RAGGED, 32, 8, 128, kv_dtype=FP8),
    Case("fp8 d64 scaled", _RAGGED, 16, 4, 64, kv_dtype=FP8, scales=KVScales(0.05, 0.02)),
    Case("float32 d64 g3", _RAGGED, 9, 3, 64, dtype=torch.float32),
    Case("float32 d128 g4", _RAGGED, 8, 2, 128, dtype=torch.float32),
)

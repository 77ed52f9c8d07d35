"""What attention is asked: keys and values live in the block pool, and are found through block tables.

Every layer of a step does the same two things: first `write_kv` puts the keys and values of the step's tokens into
their slots, then `attend` lets every query of the step look at its own request's keys through the pool, those just
written included. So a chunk of a prompt, a decode step and a prefix hit are one case: queries at some positions, keys
below.

Which blocks and which slots is the same for all layers: an `AttentionMetadata`, made once a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from engine.executor import ScheduledRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Where a step's tokens, keys and values are. Requests and tokens are in the order of the flat batch.

    Query i of a request stands at position `context_lens[r] - num_queries + i`, and sees no key after itself.
    """

    num_decodes: int  # the first num_decodes requests have exactly one query token
    query_start: npt.NDArray[np.int32]  # [num_requests + 1]: a request's rows of the flat token batch
    context_lens: npt.NDArray[np.int32]  # [num_requests]: tokens with KV, this step's included
    block_tables: npt.NDArray[np.int32]  # [num_requests, max_blocks], padded with 0, the null block
    slot_mapping: npt.NDArray[np.int64]  # [num_tokens]: block_id · block_size + position % block_size
    positions: npt.NDArray[np.int64]  # [num_tokens]
    # [num_requests]: chunks of prompts, also of a single token; None: whatever has one query is a decode.
    is_prompt: npt.NDArray[np.bool_] | None = None

    @property
    def num_requests(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a model asks of attention, the same for every step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: "torch.dtype"  # of queries, keys and values as they are computed
    kv_dtype: "torch.dtype"  # of the pool: `dtype`, or float8_e4m3fn
    scale: float  # of scores
    windows: frozenset[int | None] = frozenset({None})  # of its layers
    max_context_len: int = 4096  # tokens; no request of a `replayed` step is longer


@dataclass(frozen=True, slots=True)
class KVScales:
    """One layer's: stored = computed / scale. Per tensor, and 1 unless the pool is of an 8-bit type.

    The quotient is one of float32; stored is the nearest value (ties to even), what is too large the largest: 448 in
    float8_e4m3fn. NaN stays NaN.
    """

    k: float = 1.0
    v: float = 1.0


UNSCALED = KVScales()


class AttentionBackend(Protocol):
    """Attention over the pool. One suite of tests runs over all implementations; `reference` is the oracle.

    `prepare`, once; then for each step `plan`, and `write_kv` and `attend` for each layer.
    """

    can_replay: bool  # whether `plan` takes `replayed`

    @property
    def needs_torch_threads(self) -> bool:
        """Whether, once prepared, torch's threads have something to do here."""
        ...

    def prepare(self, shape: AttentionShape) -> None:
        """Compiles (or loads from disk) what serving such a model needs: a worker does it before it reports ready.

        May be called again, with another shape.

        Raises:
            ValueError: it cannot serve such a model; the message says why.
        """
        ...

    def plan(self, metadata: AttentionMetadata, *, replayed: bool = False) -> None:
        """Takes in what all layers of the step share; holds until the next call.

        With `replayed` (only if `can_replay`; decodes only) everything that `write_kv` and `attend` read on the device
        lies where it lay at the last such call for as many requests: what a CUDA graph has captured then may be
        replayed now.
        """
        ...

    def write_kv(
        self, pool_layer_kv: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", *, scales: KVScales = UNSCALED
    ) -> None:
        """Puts the keys and values of the step's tokens into their slots.

        Args:
            pool_layer_kv: [num_blocks, 2, num_kv_heads, block_size, head_dim], `kv_dtype`; one layer's view of
                the pool: the last three dimensions of a block are contiguous, blocks lie block_stride apart.
            k, v: [num_tokens, num_kv_heads, head_dim], `dtype`; may be views with any strides but the last.
        """
        ...

    def attend(
        self, q: "torch.Tensor", pool_layer_kv: "torch.Tensor", *, window: int | None, scales: KVScales = UNSCALED
    ) -> "torch.Tensor":
        """Causal attention of all queries; with `window` W a query at position p sees the keys p - W + 1 … p.

        A request's result does not depend, in any bit, on its batch mates or on its block ids.

        Args:
            q: [num_tokens, num_heads, head_dim], `dtype`; head h reads KV head h · num_kv_heads // num_heads.
            pool_layer_kv: as in `write_kv`; slots that no query sees have no influence, even if they hold NaN.

        Returns:
            [num_tokens, num_heads, head_dim], q's dtype.
        """
        ...


def build_metadata(
    requests: Sequence[ScheduledRequest], *, block_size: int, kv_cache_group: int = 0
) -> AttentionMetadata:
    """The metadata of a step for the layers of one KV cache group; decodes come first in `requests`.

    Raises:
        ValueError: a block table is too short for the request's tokens.
    """
    num_requests = len(requests)
    query_lens = np.fromiter((len(r.token_ids) for r in requests), np.int32, num_requests)
    context_lens = np.fromiter((r.num_computed_tokens for r in requests), np.int32, num_requests) + query_lens
    query_start = np.zeros(num_requests + 1, np.int32)
    np.cumsum(query_lens, out=query_start[1:])

    # Growth may be reserved beyond the context: blocks that nothing reads stay out.
    num_blocks = -(-context_lens // block_size)
    block_tables = np.zeros((num_requests, int(num_blocks.max(initial=1))), np.int32)
    for row, request, needed in zip(block_tables, requests, num_blocks.tolist(), strict=True):
        table = request.block_tables[kv_cache_group]
        if len(table) < needed:
            raise ValueError(f"request {request.request_id}: its block table has {len(table)} blocks, needs {needed}")
        row[:needed] = table[:needed]

    request_of_token = np.repeat(np.arange(num_requests), query_lens)
    # Row i of the flat batch is at position (context - query length) + (i - its request's first row).
    positions = np.arange(query_start[-1], dtype=np.int64)
    positions += (context_lens - query_start[1:]).astype(np.int64)[request_of_token]
    block_ids = block_tables[request_of_token, positions // block_size].astype(np.int64)

    is_prefill = query_lens != 1
    return AttentionMetadata(
        num_decodes=int(is_prefill.argmax()) if is_prefill.any() else num_requests,
        query_start=query_start,
        context_lens=context_lens,
        block_tables=block_tables,
        slot_mapping=block_ids * block_size + positions % block_size,
        positions=positions,
        is_prompt=np.fromiter((r.is_prompt for r in requests), np.bool_, num_requests),
    )

"""A step's block tables as FlashInfer reads them: ragged arrays, a run of pages a request. Plain NumPy.

FlashInfer says "page" for a block, and "indptr" for where each request's run starts in a ragged array. Request r of a
list has the pages `kv_indices[kv_indptr[r] : kv_indptr[r + 1]]`, all full but the last, which holds `last_page_len[r]`
tokens, those of this step included; and the queries `qo_indptr[r]` up to `qo_indptr[r + 1]`, which are its last tokens.

The requests of a step are dealt into `Part`s, each of which is one call a layer. A part is made by the number of a
request's own queries alone, so that a request is computed in the same way whatever else is in the batch:

- One query: these go to the decode kernel, wherever in the batch they stand.
- More: FlashInfer cuts the queries of a call into tiles, and takes the size of a tile from the *average* number of rows
  (queries times heads that share a KV head) of the call's requests: up to 16, up to 64, or more. Another size is
  another order of additions. The average of numbers from one of these ranges is in that range, so a call for each range
  fixes the size. Most steps need one such call, since most have one chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.attention.backend import AttentionMetadata

Ints = npt.NDArray[np.int32]

# The most rows of a request for each size of tile but the largest: `FA2DetermineCtaTileQ` of FlashInfer 0.7.4.
ROWS_OF_TILES = (16, 64)
# The kinds of parts: a query each; then chunks, by size of tile.
ONE_QUERY = 0
NUM_KINDS = 2 + len(ROWS_OF_TILES)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Requests of one kind, in the order in which the step has them."""

    kind: int
    rows: slice | npt.NDArray[np.int64]  # of the flat batch; a slice if they follow one another
    pages: slice  # their run of the step's kv_indices
    qo_indptr: Ints  # [num_requests + 1]
    kv_indptr: Ints  # [num_requests + 1], from 0
    last_page_len: Ints  # [num_requests]

    @property
    def num_requests(self) -> int:
        return len(self.last_page_len)


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """A step: its parts, and where the keys and values of its tokens go.

    Requests of the arrays here are in the order of the parts, one after the other; tokens in that of the flat batch.
    """

    parts: tuple[Part, ...]
    batch_indices: Ints  # [num_tokens]: the request of a token
    positions: Ints  # [num_tokens]
    kv_indptr: Ints  # [num_requests + 1]
    kv_indices: Ints  # [kv_indptr[-1]]: block ids
    last_page_len: Ints  # [num_requests]


def paged_step(metadata: AttentionMetadata, *, block_size: int, group_size: int) -> PagedStep:
    """The arrays of a step.

    Args:
        group_size: query heads that share a KV head.
    """
    query_lens = np.diff(metadata.query_start)
    kinds = np.where(query_lens == 1, ONE_QUERY, 1 + np.searchsorted(ROWS_OF_TILES, query_lens * group_size))
    order = np.argsort(kinds, kind="stable")

    context_lens = metadata.context_lens[order]
    num_pages = -(-context_lens // block_size)
    kv_indptr = _indptr(num_pages)
    is_page = np.arange(metadata.block_tables.shape[1]) < num_pages[:, None]
    last_page_len = context_lens - (num_pages - 1) * block_size

    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order))
    return PagedStep(
        parts=tuple(_parts(metadata, kinds[order], order, kv_indptr, last_page_len)),
        batch_indices=np.repeat(place, query_lens),
        positions=metadata.positions.astype(np.int32),
        kv_indptr=kv_indptr,
        kv_indices=metadata.block_tables[order][is_page],
        last_page_len=last_page_len,
    )


def _parts(
    metadata: AttentionMetadata, kinds: npt.NDArray[np.int64], order: npt.NDArray[np.int64], kv_indptr: Ints, last: Ints
) -> Iterator[Part]:
    starts, ends = metadata.query_start[:-1][order], metadata.query_start[1:][order]
    for kind in range(NUM_KINDS):
        first, end = np.searchsorted(kinds, [kind, kind + 1]).tolist()
        if first == end:
            continue
        rows: slice | npt.NDArray[np.int64] = slice(int(starts[first]), int(ends[end - 1]))
        if (starts[first + 1 : end] != ends[first : end - 1]).any():
            rows = np.concatenate([np.arange(s, e) for s, e in zip(starts[first:end], ends[first:end], strict=True)])
        yield Part(
            kind=kind,
            rows=rows,
            pages=slice(int(kv_indptr[first]), int(kv_indptr[end])),
            qo_indptr=_indptr(ends[first:end] - starts[first:end]),
            kv_indptr=kv_indptr[first : end + 1] - kv_indptr[first],
            last_page_len=last[first:end],
        )


def _indptr(lengths: Ints) -> Ints:
    indptr = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=indptr[1:])
    return indptr

"""What all layers of a step share on a CPU, beyond the metadata."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import AttentionMetadata
from engine.attention.cpu_pool import LayerGeometry, find_rows
from engine.cpu_tiles import LANES


class Rows(NamedTuple):
    """Where every position's key begins in a layer: `cpu_pool.find_rows`."""

    starts: npt.NDArray[np.int64]  # [num_requests]
    decode_starts: npt.NDArray[np.int64]  # [num_decodes]
    rows: npt.NDArray[np.int64]


class MaskedTile(NamedTuple):
    """Some queries of a chunk, and the keys that any of them sees."""

    queries: slice
    keys: slice
    mask: torch.Tensor  # [queries, keys]: 0, or -inf where a query does not see a key


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Made once a step. Requests with one query are decodes, all others prefills.

    And so is the last token of a prompt that is computed by itself, because the others are cached or because a chunk
    ended there: it is then the same, to the bit, as in any other chunk.
    """

    metadata: AttentionMetadata
    decodes: npt.NDArray[np.int64]  # [num_decodes] requests
    decode_rows: slice | torch.Tensor  # their rows of the batch
    decode_tables: npt.NDArray[np.int32]
    decode_contexts: npt.NDArray[np.int32]
    alone: npt.NDArray[np.int64]  # places of the decodes that one thread computes
    shared: npt.NDArray[np.int64]  # places of those that all threads compute, in the order in which they take them
    prefills: list[int]
    largest_slot: int  # read as unsigned, so that a negative one is large
    largest_block: int
    masked_tiles: dict[tuple[int, int | None], list[MaskedTile]] = field(default_factory=dict)  # by (request, window)
    _rows: dict[LayerGeometry, Rows] = field(default_factory=dict)

    @classmethod
    def of(cls, metadata: AttentionMetadata, num_threads: int, least_shared: int) -> "StepPlan":
        """
        Args:
            least_shared: tokens of context from which on a decode is worth waking threads.
        """
        query_lens = np.diff(metadata.query_start)
        is_decode = query_lens == 1
        if metadata.is_prompt is not None:
            is_decode &= ~metadata.is_prompt
        decodes = np.flatnonzero(is_decode)
        decode_rows: slice | torch.Tensor
        chosen: slice | npt.NDArray[np.int64]
        if len(decodes) == 0 or decodes[-1] == len(decodes) - 1:  # the usual case: they are all at the front
            decode_rows = chosen = slice(0, len(decodes))
        else:
            decode_rows, chosen = torch.from_numpy(metadata.query_start[decodes].astype(np.int64)), decodes
        contexts = metadata.context_lens[chosen]
        # By its own length alone: what batch mates there are must not decide which code computes a request.
        is_shared = contexts >= least_shared if num_threads > 1 else np.zeros(len(contexts), np.bool_)
        # Threads take equal runs of the order: deal them long and short contexts alike.
        by_length = np.argsort(-contexts, kind="stable")
        longest_first = by_length[is_shared[by_length]]
        return cls(
            metadata=metadata,
            decodes=decodes,
            decode_rows=decode_rows,
            decode_tables=metadata.block_tables[chosen],
            decode_contexts=contexts,
            alone=np.flatnonzero(~is_shared),
            shared=np.concatenate([longest_first[t::num_threads] for t in range(num_threads)]),
            prefills=np.flatnonzero(~is_decode).tolist(),
            largest_slot=int(metadata.slot_mapping.view(np.uint64).max(initial=0)),
            largest_block=int(metadata.block_tables.view(np.uint32).max(initial=0)),
        )

    def rows(self, geometry: LayerGeometry) -> Rows:
        """Found for the first layer that asks; the others lie alike."""
        found = self._rows.get(geometry)
        if found is None:
            context_lens = self.metadata.context_lens
            lengths = context_lens.astype(np.int64) + LANES - 1
            starts = np.cumsum(lengths) - lengths
            found = Rows(starts, starts[self.decodes], np.empty(int(lengths.sum()), np.int64))
            find_rows(self.metadata.block_tables, context_lens, geometry, found.starts, found.rows)
            self._rows[geometry] = found
        return found

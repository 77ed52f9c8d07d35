"""What the two ends of a hand-off need of the worker around them.

All methods are called on the event loop and must not block: a worker posts them to its engine thread and reports back
on the loop. Both ports are safe against any order of events, so a worker may report late, and twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.memory import KVLayout
from kvtransfer.events import HandoffResult, HolderLost, WorkerEvent
from kvtransfer.handle import PoolHandle
from kvtransfer.messages import Complete, Open

HolderListener = Callable[[WorkerEvent], None]


@dataclass(frozen=True, slots=True)
class HolderPool:
    """The pool that a holder hands out of."""

    handle: PoolHandle
    layout: KVLayout
    num_groups: int = 1  # KV cache groups


class HolderPort(Protocol):
    """A worker's engine, as holder."""

    def start_prefill(self, open: Open, listener: HolderListener) -> None:
        """Queues the prefill of `open.source` (a `PrefillSource`), with a next token for each of its choices.

        Reports, in this order: at most one `Started` when it is first scheduled; `Filled` after each chunk, whose
        blocks have been pinned once each on behalf of the hand-off, in order and without holes within a group, starting
        at block 0 (or at skip_blocks: what lies below is let go again) and ending with the partial last block;
        `Computed`. Or `Failed`, at any time (`refused` if the engine did not take it at all).

        A block may be reported a second time, with a pin of its own, when the request was preempted and recomputed.

        Raises:
            HandoffRefused: at once, when the worker does not take it (draining, full, too long); nothing is queued.
        """
        ...

    def pin_cached(self, open: Open, listener: HolderListener) -> None:
        """Pins the longest leading run of `open.source.block_hashes` that is cached, and reports one `CachedPinned`
        (empty tables if nothing is), or `Failed`.

        Raises:
            HandoffRefused: as for `start_prefill`.
        """
        ...

    def abort(self, handoff_id: str) -> None:
        """Stops computing for a hand-off, also if it is still queued: it is never computed then. Idempotent.

        Events reported later are still accepted: the pins that they carry are given back by `unpin`.
        """
        ...

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Gives back one pin of each of these blocks."""
        ...


class ConsumerPort(Protocol):
    """A worker's engine, as consumer.

    For every hand-off exactly one of `committed`, `holder_lost` and `ended` is called, as its last event; `ended` if
    the worker aborted it. From then on no copy is in flight into the request's blocks, and none will be.
    """

    def first_tokens(self, request_id: str, complete: Complete) -> None:
        """The first token of each choice of the prompt, and its log-probabilities if they were asked for: for the
        client at once; they are right even if the hand-off fails later."""
        ...

    def commit_blocks(self, request_id: str, num_blocks: int) -> None:
        """The leading `num_blocks` blocks of the request are real: full ones may enter the prefix cache."""
        ...

    def committed(self, request_id: str, result: HandoffResult) -> None:
        """All blocks are real and everything is said: the request may decode (or, after a cached source, go on)."""
        ...

    def holder_lost(self, request_id: str, lost: HolderLost) -> None:
        """The hand-off failed on the holder's side, or on the way. Confirmed blocks are real and stay; the same
        reservation serves the next hand-off, opened with skip_blocks = confirmed."""
        ...

    def ended(self, request_id: str) -> None:
        """An aborted hand-off is over: its blocks may be freed."""
        ...

"""The holder's end of one hand-off, as a pure state machine: events in, actions out, the clock passed in.

    QUEUED ──> COMPUTING ──> HOLDING ──> DONE          everything announced is confirmed, `Complete` is sent
       └───────────┴────────────┴──────> ENDED         broken stream, expired lease, deadline, failure, bad message

QUEUED: the engine has the prefill, or looks up the cached prefix. COMPUTING: blocks are filled, pinned by the
engine and announced. HOLDING: all are announced, the consumer still copies.

Every announced block carries one pin, owned by the machine: dropped by `Unpin` when a `Pulled` is confirmed, or all at
once at the end. The engine pins before it reports, so that whatever arrives late (in DONE or ENDED, or a block for the
second time) carries pins too: they are given back, and nothing else happens. So no order of events can leak a block,
and since only this machine drops pins, a `Pulled` that finds a block still in its books may be confirmed at once.
"""

from collections.abc import Iterable, Sequence
from enum import Enum

from engine.kvcache.block import NULL_BLOCK_ID
from kvtransfer.errors import Code
from kvtransfer.events import (
    AbortCompute,
    CachedPinned,
    CloseStream,
    Computed,
    Failed,
    Filled,
    HolderAction,
    HolderEvent,
    PinCached,
    Send,
    Started,
    StartPrefill,
    StreamEnded,
    Tick,
    Unpin,
)
from kvtransfer.handle import PoolHandle
from kvtransfer.messages import (
    Accepted,
    CachedSource,
    Complete,
    Confirmed,
    HandoffTimes,
    Open,
    PrefillSource,
    Pulled,
    Ready,
)


class HolderState(Enum):
    QUEUED = "queued"
    COMPUTING = "computing"
    HOLDING = "holding"
    DONE = "done"
    ENDED = "ended"


class HolderEnd(Enum):
    """Why a hand-off ended, for the counters."""

    DONE = "done"
    REFUSED = "refused"  # by the worker's port
    FINGERPRINT = "fingerprint"  # the consumer has another model
    STREAM = "stream"  # broken or cancelled by the consumer
    LEASE = "lease"  # no progress by the consumer
    DEADLINE = "deadline"
    FAILED = "failed"  # the own engine
    PROTOCOL = "protocol"  # the consumer's message makes no sense


class Holder:
    """One hand-off. `handle` may be called with any event in any state."""

    def __init__(
        self,
        open: Open,
        pool: PoolHandle,
        *,
        block_size: int,
        fingerprint: bytes,
        num_groups: int = 1,
        times: HandoffTimes | None = None,
    ) -> None:
        self.open = open
        self.state = HolderState.QUEUED
        self.end: HolderEnd | None = None
        self._pool = pool
        self._block_size = block_size
        self._fingerprint = fingerprint
        self._times = times or HandoffTimes()
        self._num_blocks = 0  # known: at once for a prefill, with `CachedPinned` otherwise
        self._tables: list[list[int]] = [[] for _ in range(num_groups)]  # announced, from index `_skip` on
        self._skip = 0
        self._num_confirmed = 0  # below: no pin any more
        self._deadline = 0.0
        self._lease_until: float | None = None  # while the consumer has something to copy

    # --- what it holds

    @property
    def pinned(self) -> list[int]:
        """Blocks that carry a pin of this hand-off, each once for each pin."""
        start = self._num_confirmed - self._skip
        return [b for table in self._tables for b in table[max(start, 0) :] if b != NULL_BLOCK_ID]

    @property
    def is_over(self) -> bool:
        return self.state in (HolderState.DONE, HolderState.ENDED)

    @property
    def next_deadline(self) -> float | None:
        """When to call `handle(Tick())` at the latest; None: never."""
        if self.is_over:
            return None
        return self._deadline if self._lease_until is None else min(self._deadline, self._lease_until)

    @property
    def num_stale_blocks(self) -> int:
        """Blocks that the consumer hoped to find cached here, in vain."""
        source = self.open.source
        if isinstance(source, CachedSource) and self.state in (HolderState.HOLDING, HolderState.DONE):
            return len(source.block_hashes) - self._num_blocks
        return 0

    # --- events

    def start(self, now: float) -> list[HolderAction]:
        """Answers the `Open`. Called once, before any event."""
        source = self.open.source
        self._deadline = now + (self.open.timeout_s or self._times.deadline_s)
        if self.open.fingerprint != self._fingerprint:
            return self._finish(
                HolderEnd.FINGERPRINT,
                Code.FAILED_PRECONDITION,
                f"fingerprints differ: the consumer has {self.open.fingerprint.hex()}, "
                f"this worker {self._fingerprint.hex()}: not the same weights, dtype and layout",
            )
        if isinstance(source, CachedSource):
            return [PinCached()]
        self._num_blocks = -(-len(source.token_ids) // self._block_size)
        if not 0 < source.num_prompt_tokens <= len(source.token_ids):
            message = f"num_prompt_tokens is {source.num_prompt_tokens}, with {len(source.token_ids)} tokens"
            return self._finish(HolderEnd.PROTOCOL, Code.INVALID_ARGUMENT, message)
        if source.skip_blocks > self._num_blocks:
            message = f"skip_blocks is {source.skip_blocks}, but the tokens fill only {self._num_blocks} blocks"
            return self._finish(HolderEnd.PROTOCOL, Code.INVALID_ARGUMENT, message)
        self._skip = self._num_confirmed = source.skip_blocks
        return [StartPrefill(), Send(Accepted(0, self._num_blocks, self._times.lease_s, self._pool))]

    def handle(self, event: HolderEvent, now: float) -> list[HolderAction]:
        """What to do about an event, in this order. Never fails, whatever the event and the state."""
        match event:
            case Started():
                if self.state is HolderState.QUEUED and isinstance(self.open.source, PrefillSource):
                    self.state = HolderState.COMPUTING
                return []
            case Filled():
                return self._filled(event, now)
            case CachedPinned():
                return self._cached_pinned(event, now)
            case Computed():
                return self._computed(event, now)
            case Pulled():
                return self._pulled(event, now)
            case Failed():
                if event.refused and self.state is HolderState.QUEUED:
                    return self._finish(HolderEnd.REFUSED, event.code, event.message)
                return self._end(HolderEnd.FAILED, event.code, event.message)
            case StreamEnded():
                return self._end(HolderEnd.STREAM, None, event.message)
            case Tick():
                return self._tick(now)

    def _filled(self, event: Filled, now: float) -> list[HolderAction]:
        expected = self.state in (HolderState.QUEUED, HolderState.COMPUTING)
        if not (expected and isinstance(self.open.source, PrefillSource)):
            return _unpin(event.block_ids)
        self.state = HolderState.COMPUTING
        if not 0 <= event.group < len(self._tables):
            message = f"the engine filled blocks of group {event.group} of {len(self._tables)}"
            return _unpin(event.block_ids) + self._end(HolderEnd.FAILED, Code.INTERNAL, message)
        announced = self._num_announced(event.group)
        end = event.first + len(event.block_ids)
        if event.first > announced or end > self._num_blocks:
            message = (
                f"the engine filled blocks [{event.first}, {end}) of {self._num_blocks}, "
                f"with those below {announced} filled before"
            )
            return _unpin(event.block_ids) + self._end(HolderEnd.FAILED, Code.INTERNAL, message)
        # Below `announced`: skipped, or filled again after a preemption. The consumer does not need them once more.
        known = announced - event.first
        new_ids = event.block_ids[known:]
        actions = _unpin(event.block_ids[:known])
        if new_ids:
            self._tables[event.group].extend(new_ids)
            actions.append(Send(Ready(announced, new_ids, event.num_tokens, event.group, event.fence)))
            self._renew_lease(now, restart=False)
        return actions

    def _cached_pinned(self, event: CachedPinned, now: float) -> list[HolderAction]:
        tables = event.block_tables
        if self.state is not HolderState.QUEUED or not isinstance(self.open.source, CachedSource):
            return _unpin(b for table in tables for b in table)
        if len(tables) != len(self._tables):
            message = f"the engine pinned blocks of {len(tables)} groups, not {len(self._tables)}"
            return _unpin(b for table in tables for b in table) + self._end(HolderEnd.FAILED, Code.INTERNAL, message)
        self.state = HolderState.HOLDING
        self._num_blocks = min(len(self.open.source.block_hashes), *(len(table) for table in tables))
        self._skip = self._num_confirmed = min(self.open.source.skip_blocks, self._num_blocks)
        num_tokens = self._num_blocks * self._block_size
        actions = _unpin(b for t in tables for b in (*t[: self._skip], *t[self._num_blocks :]))
        actions.append(Send(Accepted(num_tokens, self._num_blocks, self._times.lease_s, self._pool)))
        for group, table in enumerate(tables):
            self._tables[group] = list(table[self._skip : self._num_blocks])
            if self._tables[group]:
                ready = Ready(self._skip, tuple(self._tables[group]), num_tokens, group, event.fence)
                actions.append(Send(ready))
        actions.append(Send(Complete((), num_tokens, num_tokens)))
        self._renew_lease(now, restart=True)
        return actions + self._confirm_if_nothing_to_pull()

    def _computed(self, event: Computed, now: float) -> list[HolderAction]:
        expected = self.state in (HolderState.QUEUED, HolderState.COMPUTING)
        if not (expected and isinstance(self.open.source, PrefillSource)):
            return []
        announced = min(self._num_announced(g) for g in range(len(self._tables)))
        if announced < self._num_blocks:
            message = f"the engine ended the prefill with {announced} of {self._num_blocks} blocks filled"
            return self._end(HolderEnd.FAILED, Code.INTERNAL, message)
        self.state = HolderState.HOLDING
        complete = Complete(
            event.first_tokens,
            event.num_tokens,
            event.num_cached_tokens,
            event.queued_s,
            event.prefill_s,
            event.prompt_logprobs,
        )
        actions: list[HolderAction] = [Send(complete)]
        if self._num_confirmed == self._num_blocks and self._skip < self._num_blocks:
            return actions + self._finish(HolderEnd.DONE, Code.OK)
        return actions + self._confirm_if_nothing_to_pull()

    def _confirm_if_nothing_to_pull(self) -> list[HolderAction]:
        if self._skip < self._num_blocks:
            return []
        return [Send(Confirmed(self._num_blocks)), *self._finish(HolderEnd.DONE, Code.OK)]

    def _pulled(self, event: Pulled, now: float) -> list[HolderAction]:
        if self.is_over:
            return []
        announced = min(self._num_announced(g) for g in range(len(self._tables)))
        if event.num_blocks > announced:
            message = f"pulled {event.num_blocks} blocks, but only {announced} were announced"
            return self._end(HolderEnd.PROTOCOL, Code.INVALID_ARGUMENT, message)
        if event.num_blocks <= self._num_confirmed:
            return []
        start, stop = self._num_confirmed - self._skip, event.num_blocks - self._skip
        # The pins are alive: here they are. So what was copied is what was announced.
        actions: list[HolderAction] = [Send(Confirmed(event.num_blocks))]
        actions += _unpin(b for table in self._tables for b in table[start:stop])
        self._num_confirmed = event.num_blocks
        self._renew_lease(now, restart=True)
        if self.state is HolderState.HOLDING and self._num_confirmed == self._num_blocks:
            actions += self._finish(HolderEnd.DONE, Code.OK)
        return actions

    def _tick(self, now: float) -> list[HolderAction]:
        if self.is_over:
            return []
        if now >= self._deadline:
            message = f"hand-off {self.open.handoff_id} did not end within its deadline"
            return self._end(HolderEnd.DEADLINE, Code.DEADLINE_EXCEEDED, message)
        if self._lease_until is not None and now >= self._lease_until:
            message = f"the consumer pulled nothing for {self._times.lease_s} s: the lease has expired"
            return self._end(HolderEnd.LEASE, Code.ABORTED, message)
        return []

    # --- inside

    def _num_announced(self, group: int) -> int:
        return self._skip + len(self._tables[group])

    def _renew_lease(self, now: float, *, restart: bool) -> None:
        """The lease runs while the consumer has something to copy; progress extends it, announcing more does not."""
        if max(self._num_announced(g) for g in range(len(self._tables))) == self._num_confirmed:
            self._lease_until = None
        elif restart or self._lease_until is None:
            self._lease_until = now + self._times.lease_s

    def _end(self, end: HolderEnd, code: Code | None, message: str) -> list[HolderAction]:
        """Drops what is left and stops what still computes. `code` None: there is no stream to say it on."""
        if self.is_over:
            return []
        actions: list[HolderAction] = []
        if self.state in (HolderState.QUEUED, HolderState.COMPUTING):
            actions.append(AbortCompute())
        actions += _unpin(self.pinned)
        return actions + self._finish(end, code, message)

    def _finish(self, end: HolderEnd, code: Code | None, message: str = "") -> list[HolderAction]:
        self.state = HolderState.DONE if end is HolderEnd.DONE else HolderState.ENDED
        self.end = end
        self._tables = [[] for _ in self._tables]
        self._lease_until = None
        return [] if code is None else [CloseStream(code, message)]


def _unpin(block_ids: Iterable[int]) -> list[HolderAction]:
    ids: Sequence[int] = tuple(b for b in block_ids if b != NULL_BLOCK_ID)
    return [Unpin(tuple(ids))] if ids else []

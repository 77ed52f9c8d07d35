"""What a worker caches, told to whoever subscribes: a snapshot, then every change (PROTOCOL §3).

The publisher keeps the set of cached hashes itself, beside the pool's, so that a snapshot and the sequence number it
belongs to are taken at one instant, without asking the engine's thread. It lives on the asyncio loop.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.kvcache.block_hash import BlockHash
from engine.kvcache.events import BlocksRemoved, BlocksStored, CacheCleared, KVEvent


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The changes of one engine step."""

    epoch: int
    sequence: int
    events: tuple[KVEvent, ...]


class SubscriberTooSlow(Exception):
    """A subscriber's queue is full: it is cut off, and comes again for a snapshot."""


class Subscription:
    """One subscriber's view: the snapshot it starts from, and a bounded queue of what came since.

    `epoch` and `sequence` are those of what it was given last: a heartbeat that told of more would look like a gap.
    """

    def __init__(self, epoch: int, sequence: int, hashes: frozenset[BlockHash], max_backlog: int) -> None:
        self.epoch = epoch
        self.sequence = sequence
        self.snapshot = hashes
        self._max_backlog = max_backlog
        self._batches: deque[EventBatch] = deque()
        self._overflowed = False
        self._arrived = asyncio.Event()

    def put(self, batch: EventBatch) -> None:
        """Queues a batch; past the bound the subscription is broken for good."""
        if len(self._batches) >= self._max_backlog:
            self._overflowed = True
            self._batches.clear()
        else:
            self._batches.append(batch)
        self._arrived.set()

    async def next(self, timeout: float) -> EventBatch | None:
        """The next batch, or None if there was none for `timeout` seconds.

        Raises:
            SubscriberTooSlow: batches were lost.
        """
        if not self._batches and not self._overflowed:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), timeout)
            except TimeoutError:
                return None
        if self._overflowed:
            raise SubscriberTooSlow(f"more than {self._max_backlog} batches behind")
        batch = self._batches.popleft()
        self.epoch, self.sequence = batch.epoch, batch.sequence
        return batch


class KvEventPublisher:
    """Numbers the batches and hands them to all subscriptions."""

    def __init__(self, max_backlog: int = 4096) -> None:
        self.epoch = 1
        self.sequence = 0
        self._max_backlog = max_backlog
        self._hashes: set[BlockHash] = set()
        self._subscriptions: set[Subscription] = set()

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Tells all subscribers what one step changed, in the order the pool made it; nothing if nothing changed."""
        if not events:
            return
        for event in events:
            match event:
                case BlocksStored(hashes):
                    self._hashes.update(hashes)
                case BlocksRemoved(hashes):
                    self._hashes.difference_update(hashes)
                case CacheCleared():
                    self._hashes.clear()
                    self.epoch += 1
        self.sequence += 1
        batch = EventBatch(self.epoch, self.sequence, tuple(events))
        for subscription in self._subscriptions:
            subscription.put(batch)

    def subscribe(self) -> Subscription:
        """A snapshot of now, and all batches from here on; give it back with `unsubscribe`."""
        subscription = Subscription(self.epoch, self.sequence, frozenset(self._hashes), self._max_backlog)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

"""What became of the cache's content, for directories that follow it from afar.

A hash is `stored` with its first copy and `removed` with its last: how many copies there are is nobody else's business.
Who applies the events in order, from an empty set or a snapshot, knows exactly the cached hashes.
"""

from dataclasses import dataclass

from engine.kvcache.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """These can be found from now on."""

    block_hashes: tuple[BlockHash, ...]
    group_id: int = 0


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These cannot any more."""

    block_hashes: tuple[BlockHash, ...]
    group_id: int = 0


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Forget everything, of all groups; what is still there follows as `BlocksStored`."""


KVEvent = BlocksStored | BlocksRemoved | CacheCleared


class EventLog:
    """Collects events in order; neighbours of one kind and group become one event."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []
        self._kind: type[BlocksStored] | type[BlocksRemoved] = BlocksStored  # of the open event
        self._group_id = 0
        self._open: list[BlockHash] = []

    def __len__(self) -> int:
        return len(self._events) + bool(self._open)

    def stored(self, block_hash: BlockHash, group_id: int) -> None:
        self._add(BlocksStored, block_hash, group_id)

    def removed(self, block_hash: BlockHash, group_id: int) -> None:
        self._add(BlocksRemoved, block_hash, group_id)

    def cleared(self) -> None:
        self._close()
        self._events.append(CacheCleared())

    def take(self) -> tuple[KVEvent, ...]:
        """All events since the last call, in the order they happened."""
        self._close()
        events = tuple(self._events)
        self._events.clear()
        return events

    def _add(self, kind: type[BlocksStored] | type[BlocksRemoved], block_hash: BlockHash, group_id: int) -> None:
        if kind is not self._kind or group_id != self._group_id:
            self._close()
            self._kind, self._group_id = kind, group_id
        self._open.append(block_hash)

    def _close(self) -> None:
        if self._open:
            self._events.append(self._kind(tuple(self._open), self._group_id))
            self._open.clear()

"""Peers whose pool on a GPU cannot be mapped here, so that their blocks come staged, through host memory."""

import logging
from collections import OrderedDict

from kvtransfer.errors import PoolUnreachable
from kvtransfer.handle import PoolHandle

logger = logging.getLogger(__name__)

# Kinds of pools that their owner can stage: those that not every process of a host can map.
STAGED_KINDS = ("cuda_ipc",)

# Far more peers than a worker has. What is forgotten is tried, and found, again.
MAX_PEERS = 1024


class UnmappablePools:
    """What was found out about each peer's present instance. Another instance of it is tried anew."""

    def __init__(self) -> None:
        self._instances: OrderedDict[str, str] = OrderedDict()  # by peer's address
        self._reported: OrderedDict[str, str] = OrderedDict()  # peer's address, by instance: each is told of once

    def found(self, peer: str, handle: PoolHandle, error: PoolUnreachable) -> bool:
        """The pool could not be mapped. Whether that is news: then it is said in the log, too."""
        _remember(self._instances, peer, handle.instance_id)
        if handle.instance_id in self._reported:
            return False
        _remember(self._reported, handle.instance_id, peer)
        logger.warning(
            "the pool of worker %s at %s cannot be mapped, its blocks come through host memory: %s",
            handle.instance_id,
            peer,
            error.message,
        )
        return True

    def has(self, peer: str) -> bool:
        """Whether hand-offs from this peer are to be staged."""
        return peer in self._instances

    def met(self, peer: str, instance_id: str) -> None:
        """This is who is there now."""
        if self._instances.get(peer, instance_id) != instance_id:
            del self._instances[peer]

    def forget(self, peer: str) -> None:
        """It is gone, or another: the next hand-off from there finds out."""
        self._instances.pop(peer, None)


def _remember(books: OrderedDict[str, str], key: str, value: str) -> None:
    books[key] = value
    books.move_to_end(key)
    if len(books) > MAX_PEERS:
        books.popitem(last=False)

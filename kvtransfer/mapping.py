"""Peers' pools, as this process sees them.

A peer's pool is mapped when the first hand-off from it copies, stays mapped for the next ones, and is unmapped when its
instance has died: reported by whoever notices first (the owner's process has ended, the stream to it broke, another
instance of the same peer has come). Never under a copy: what is in use is unmapped with its last user.

All calls on one thread (the event loop's); the copies themselves run elsewhere.
"""

import asyncio
from collections.abc import Callable
from importlib import import_module
from typing import Protocol, runtime_checkable

from kvtransfer.errors import PoolUnreachable
from kvtransfer.handle import PoolHandle


class PoolMapping(Protocol):
    """A peer's pool, readable here."""

    @property
    def owner_fd(self) -> int | None:
        """A file descriptor that becomes readable when the owner dies; None: it cannot die alone."""
        ...

    def close(self) -> None:
        """Unmaps it; idempotent."""
        ...


@runtime_checkable
class HostMapping(PoolMapping, Protocol):
    """One that the CPU reads."""

    @property
    def buffer(self) -> memoryview:
        """The pool from block 0 on, read-only."""
        ...


# Each kind of handle, and the class that maps it: `Mapping(handle) -> PoolMapping`, or PoolUnreachable.
MAPPINGS = {
    "memfd": "kvtransfer.memfd:MemfdMapping",
    "cuda_ipc": "kvtransfer.cuda_ipc:CudaIpcMapping",
    "loopback": "kvtransfer.loopback:LoopbackMapping",
}


def open_mapping(handle: PoolHandle) -> PoolMapping:
    """Maps a peer's pool.

    Raises:
        PoolUnreachable: its kind is unknown here, or it cannot be mapped.
    """
    if handle.kind not in MAPPINGS:
        raise PoolUnreachable(
            f"pools of kind {handle.kind!r} cannot be mapped here, only {', '.join(sorted(MAPPINGS))}"
        )
    module, _, name = MAPPINGS[handle.kind].partition(":")
    opener: Callable[[PoolHandle], PoolMapping] = getattr(import_module(module), name)
    return opener(handle)


class PeerPool:
    """One instance's pool, in use by any number of copies."""

    def __init__(self, handle: PoolHandle, mapping: PoolMapping) -> None:
        self.handle = handle
        self.closed = asyncio.Event()  # unmapped
        self._num_users = 0
        self._is_retired = False  # no new user: unmapped with the last one
        self._before_unmapping: list[Callable[[], None]] = []
        self.mapping = mapping

    @property
    def owner_fd(self) -> int | None:
        return self.mapping.owner_fd

    def acquire(self) -> None:
        """A copy begins: it stays mapped until `release`, whatever happens to its owner."""
        self._num_users += 1

    def release(self) -> None:
        """A copy has ended."""
        assert self._num_users > 0, self.handle.instance_id
        self._num_users -= 1
        self._close_if_unused()

    def before_unmapping(self, undo: Callable[[], None]) -> None:
        """Asked for by a user, while it is one: `undo` is called on the event loop's thread before it is unmapped."""
        self._before_unmapping.append(undo)

    def retire(self) -> None:
        """Its instance is dead, or nobody wants it any more. Idempotent."""
        self._is_retired = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_retired and self._num_users == 0:
            while self._before_unmapping:
                self._before_unmapping.pop()()
            self.mapping.close()
            self.closed.set()


class PeerPools:
    """All peers' pools: one mapping per peer instance."""

    def __init__(self) -> None:
        self._pools: dict[str, PeerPool] = {}  # by peer

    def __len__(self) -> int:
        return len(self._pools)

    def get(self, peer: str, handle: PoolHandle) -> PeerPool:
        """The pool of `handle`, mapped now if it is not. Another instance's of the same `peer` is let go.

        `peer` is what stays the same over restarts: its address.

        Raises:
            PoolUnreachable: it cannot be mapped.
        """
        pool = self._pools.get(peer)
        if pool is not None and pool.handle == handle:
            return pool
        self.forget(peer)
        pool = PeerPool(handle, open_mapping(handle))
        self._pools[peer] = pool
        if pool.owner_fd is not None:
            asyncio.get_running_loop().add_reader(pool.owner_fd, self._owner_died, peer, pool)
        return pool

    def forget(self, peer: str) -> None:
        """Lets go of a peer's pool, if there is one; a copy in flight still ends."""
        pool = self._pools.pop(peer, None)
        if pool is not None:
            if pool.owner_fd is not None:
                asyncio.get_running_loop().remove_reader(pool.owner_fd)
            pool.retire()

    def close(self) -> None:
        """Lets go of all. Idempotent."""
        for peer in list(self._pools):
            self.forget(peer)

    def _owner_died(self, peer: str, pool: PeerPool) -> None:
        if self._pools.get(peer) is pool:
            self.forget(peer)

"""The workers of a cluster, as the gateway knows them.

A worker is a member from `add_worker` to `remove_worker`, whether or not it can be reached: its link connects, and
reconnects, meanwhile. While it is *ready* it has an account in the ledger. The first worker that is reached decides
what is served; every other must describe the same model, dtype and block layout, or it is refused with a sentence
that says what differs, and tried again later: an operator may replace it by a right one at the same address.
"""

import asyncio
from collections.abc import Sequence

from cluster.clock import Clock
from cluster.directory import Directory
from cluster.errors import NoWorker
from cluster.generator import ServedModel
from cluster.ledger import Ledger
from cluster.router import Router, RouterConfig
from cluster.session import Session
from cluster.worker_info import Role, WorkerInfo, WorkerLoad, WorkerStatus
from cluster.worker_link import LinkConfig, LinkState, WorkerLink, WorkerMismatch

# What all workers must agree on, and how it is called in the message.
_AGREED = {
    "model_name": "serves the model",
    "fingerprint": "has the fingerprint",
    "block_size": "has the block size",
    "vocab_size": "has the vocabulary size",
    "max_model_len": "has the context length",
    "dtype": "computes in",
}


class Membership:
    """Who is there. Owns directory, ledger and router.

    Args:
        clock: None: the running loop's.
    """

    def __init__(
        self,
        router_config: RouterConfig | None = None,
        link_config: LinkConfig | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.directory = Directory()
        config = router_config or RouterConfig()
        self.ledger = Ledger(config.recent_half_life_s)
        self.router = Router(config, self.directory, self.ledger)
        self._link_config = link_config or LinkConfig()
        self._clock = clock
        self._links: dict[str, WorkerLink] = {}  # by address
        self._ready: dict[str, WorkerLink] = {}  # by instance id
        self._reference: WorkerInfo | None = None
        self._changed = asyncio.Event()
        self.is_closed = False
        self.expects_losses = False

    @property
    def clock(self) -> Clock:
        return self._clock or asyncio.get_running_loop()

    # --- members

    def add_worker(self, address: str) -> WorkerLink:
        """Makes the worker at `address` (host:port) a member, and begins to connect. Idempotent."""
        link = self._links.get(address)
        if link is None:
            link = WorkerLink(address, self, self.directory, self._link_config, self.clock)
            self._links[address] = link
            link.start()
        return link

    async def remove_worker(self, address_or_id: str) -> None:
        """Forgets a worker, by address or worker id; its requests move elsewhere. Nothing if there is none."""
        for address, link in list(self._links.items()):
            if address == address_or_id or (link.info is not None and link.info.worker_id == address_or_id):
                del self._links[address]
                await link.close()
                self._notify()

    def expect_losses(self) -> None:
        """From now on a worker that goes is no news: everything is ending."""
        self.expects_losses = True

    async def close(self) -> None:
        """Removes all workers, for good: requests in flight are told that the server is shutting down."""
        self.is_closed = True
        links = list(self._links.values())
        self._links.clear()
        await asyncio.gather(*(link.close() for link in links))
        self._notify()

    async def wait_ready(self, *, prefill_workers: int = 0, decode_workers: int = 1) -> None:
        """Returns once so many workers of each role are ready.

        Raises:
            WorkerMismatch: a member was refused, so that waiting might never end.
        """
        while self.num_ready(Role.PREFILL) < prefill_workers or self.num_ready(Role.DECODE) < decode_workers:
            for link in self._links.values():
                if link.mismatch is not None:
                    raise link.mismatch
            await self._changed.wait()

    async def wait_link(self, link: WorkerLink) -> WorkerInfo:
        """Returns once this worker is ready.

        Raises:
            WorkerMismatch: it was refused.
            NoWorker: it was removed meanwhile.
        """
        while link.state is not LinkState.READY:
            if link.mismatch is not None:
                raise link.mismatch
            if link.state is LinkState.CLOSED:
                raise NoWorker(f"the worker at {link.address} was removed")
            await self._changed.wait()
        assert link.info is not None, f"{link.address} is ready without a description"
        return link.info

    # --- what is known of them

    @property
    def model(self) -> ServedModel:
        """What is served; raises `NoWorker` until a first worker has been reached."""
        if self._reference is None:
            raise NoWorker(f"none of the {len(self._links)} workers has been reached yet")
        return ServedModel(
            served_model_name=self._reference.model_name,
            model_path=self._reference.model_path,
            fingerprint=self._reference.fingerprint,
            block_size=self._reference.block_size,
            vocab_size=self._reference.vocab_size,
            max_model_len=self._reference.max_model_len,
            dtype=self._reference.dtype,
        )

    def session(self, instance_id: str) -> Session | None:
        """The open session with this instance."""
        link = self._ready.get(instance_id)
        return link.session if link else None

    def num_ready(self, role: Role) -> int:
        """Workers of a role that are connected, draining ones among them."""
        return sum(link.info is not None and link.info.role is role for link in self._ready.values())

    def workers(self) -> Sequence[WorkerStatus]:
        """All members, ready or not."""
        return [self._status(link) for link in self._links.values()]

    def _status(self, link: WorkerLink) -> WorkerStatus:
        is_ready = link.state is LinkState.READY
        key = link.info.instance_id if link.info else ""
        return WorkerStatus(
            address=link.address,
            ready=is_ready,
            info=link.info,
            load=self.ledger.load(key) if is_ready else None,
            kv_events_silent=link.kv_events_silent,
            num_directory_blocks=self.directory.num_blocks(key),
            last_error=link.last_error,
        )

    # --- told by the links

    def admit(self, link: WorkerLink, info: WorkerInfo) -> None:
        for other in self._ready.values():
            if other is not link and other.info is not None and other.info.worker_id == info.worker_id:
                raise WorkerMismatch(
                    f"the worker at {link.address} calls itself {info.worker_id}, "
                    f"but so does the one at {other.address}: every worker needs an id of its own"
                )
        if self._reference is None:
            self._reference = info
            return
        for name, phrase in _AGREED.items():
            theirs, ours = getattr(info, name), getattr(self._reference, name)
            if theirs != ours:
                raise WorkerMismatch(
                    f"worker {info.worker_id} at {link.address} {phrase} {_shown(theirs)}, "
                    f"this cluster {_shown(ours)} (as {self._reference.worker_id} does)"
                )

    def ready(self, link: WorkerLink) -> None:
        assert link.info is not None, f"{link.address} is ready without a description"
        self._ready[link.info.instance_id] = link
        self.ledger.add_worker(link.info)
        self._notify()

    def load(self, link: WorkerLink, load: WorkerLoad) -> None:
        if link.info is not None:
            self.ledger.update_load(link.info.instance_id, load)

    def lost(self, link: WorkerLink) -> None:
        assert link.info is not None, f"{link.address} was ready without a description"
        self._ready.pop(link.info.instance_id, None)
        self.ledger.remove_worker(link.info.instance_id)
        self._notify()

    def failed(self, link: WorkerLink) -> None:
        self._notify()

    def _notify(self) -> None:
        # Wakes who waits now; who comes later waits for the next change.
        self._changed.set()
        self._changed = asyncio.Event()


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)

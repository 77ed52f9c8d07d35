"""A hand-off reduced to its moving: the holder has everything, the consumer computes nothing."""

import asyncio
import time
from collections.abc import Sequence

from kvtransfer.events import CachedPinned, HandoffResult, HolderLost
from kvtransfer.messages import CachedSource, Complete, Open
from kvtransfer.ports import HolderListener
from kvtransfer.puller import Puller


class FullHolder:
    """Caches whatever it is asked for, in blocks 1, 2, …. Implements `kvtransfer.ports.HolderPort`."""

    def start_prefill(self, open: Open, listener: HolderListener) -> None:
        raise AssertionError("nothing is computed here")

    def pin_cached(self, open: Open, listener: HolderListener) -> None:
        assert isinstance(open.source, CachedSource)
        listener(CachedPinned((tuple(range(1, len(open.source.block_hashes) + 1)),)))

    def abort(self, handoff_id: str) -> None: ...

    def unpin(self, block_ids: Sequence[int]) -> None: ...


class WaitingConsumer:
    """Takes one hand-off in at a time. Implements `kvtransfer.ports.ConsumerPort`."""

    def __init__(self) -> None:
        self._result: asyncio.Future[HandoffResult] | None = None

    async def pull(self, puller: Puller, fingerprint: bytes, num_blocks: int) -> tuple[float, HandoffResult]:
        """Seconds from asking to the last confirmation."""
        self._result = asyncio.get_running_loop().create_future()
        source = CachedSource(tuple(i.to_bytes(16, "little") for i in range(num_blocks)))
        began = time.perf_counter()
        puller.pull(
            "holder",
            Open(f"{began}", "request", "consumer", fingerprint, 60.0, source),
            [list(range(1, num_blocks + 1))],
        )
        result = await self._result
        return time.perf_counter() - began, result

    def first_tokens(self, request_id: str, complete: Complete) -> None: ...

    def commit_blocks(self, request_id: str, num_blocks: int) -> None: ...

    def committed(self, request_id: str, result: HandoffResult) -> None:
        assert self._result is not None
        self._result.set_result(result)

    def holder_lost(self, request_id: str, lost: HolderLost) -> None:
        assert self._result is not None
        self._result.set_exception(RuntimeError(f"the holder was lost: {lost.message}"))

    def ended(self, request_id: str) -> None: ...

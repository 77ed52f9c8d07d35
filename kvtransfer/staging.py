"""Hand-offs through host memory, for consumers that cannot map this worker's pool: the announced, counted fallback.

    engine ── Filled(blocks) ──> waiting ──> copied into slots ── Filled(slots) ──> Holder ──> consumer copies
       ^                                         │                                    │
       └────── the pool's pins, at once ─────────┘            slots ── Unpin, as pulled, or at any end

A `StagedPort` stands between a `Holder` and the worker's own port. To the holder it is an engine whose blocks are the
slots of a `memfd`, with pins of their own; to the engine it is a holder that gives pins back as soon as the bytes are
out. So neither of them, nor the protocol, knows of it.

A slot belongs to one hand-off from the copy into it until the holder unpins it. Where slots are scarce, filled blocks
wait, pinned, in their order; hand-offs take turns, and none takes more than a share, so that a consumer which has died
stalls nobody until its lease ends. A cached prefix is announced in one piece, so it is shortened to the slots that are
free: the consumer computes the rest, as it does when a prefix is gone.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from engine.kvcache.block import NULL_BLOCK_ID
from engine.memory import HostMemory, KVLayout
from kvtransfer.errors import Code
from kvtransfer.events import CachedPinned, Computed, Failed, Filled, Started, WorkerEvent
from kvtransfer.exported import ExportedMemory
from kvtransfer.messages import CachedSource, Open
from kvtransfer.ports import HolderListener, HolderPool, HolderPort
from kvtransfer.staging_area import MIN_SLOTS, STAGING_BYTES, StagingArea, StagingCopies

# Of all slots, what one hand-off holds at most. Half of that is copied at once: the consumer reads the other half.
_SHARE = 4


@dataclass(slots=True, eq=False)
class _Staged:
    """One hand-off, until the engine's last word of it has been passed on."""

    open: Open
    listener: HolderListener
    waiting: deque[Filled | Computed] = field(default_factory=deque)
    known: dict[int, int] = field(default_factory=dict)  # by group: blocks below are copied, or wait for it
    is_copying: bool = False
    is_over: bool = False


def stage_pool(
    port: HolderPort, memory: ExportedMemory, layout: KVLayout, instance_id: str, nbytes: int | None = None
) -> "StagedPort | None":
    """Copies of a pool on a GPU; None for a pool in host memory, which every process of its host can map anyway.

    Args:
        nbytes: of the copies; None: what suits, and at least a few blocks.

    Raises:
        ValueError: nbytes holds not even one block.
        OSError, CudaError: there is no host memory, or no stream, for it.
    """
    if isinstance(memory, HostMemory):
        return None
    from kvtransfer.cuda_copies import CudaStagingCopies
    from kvtransfer.cuda_ipc import CudaIpcMemory

    assert isinstance(memory, CudaIpcMemory), memory
    area = StagingArea(layout, nbytes or max(STAGING_BYTES, MIN_SLOTS * layout.bytes_per_block))
    copies = CudaStagingCopies(memory, area.memory.buffer, layout.bytes_per_block)
    return StagedPort(port, area, copies, instance_id)


class StagedPort:
    """A worker's engine, as holder of blocks in host memory. Implements `HolderPort`; all calls on the event loop."""

    def __init__(
        self, port: HolderPort, area: StagingArea, copies: StagingCopies, instance_id: str, num_groups: int = 1
    ) -> None:
        """
        Args:
            port: the worker's own; its pool is what `copies` reads.
        """
        self.pool = HolderPool(area.memory.handle(instance_id, area.layout), area.layout, num_groups)
        self._port = port
        self._area = area
        self._copies = copies
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-staging")
        self._staged: dict[str, _Staged] = {}  # by hand-off
        self._turns: deque[_Staged] = deque()  # those that have something waiting, and no copy in flight
        self._max_slots = max(1, area.num_slots // _SHARE)
        self._max_piece = max(1, self._max_slots // 2)
        self._num_copying = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # --- HolderPort

    def start_prefill(self, open: Open, listener: HolderListener) -> None:
        self._ask(self._port.start_prefill, open, listener)

    def pin_cached(self, open: Open, listener: HolderListener) -> None:
        self._ask(self._port.pin_cached, open, listener)

    def abort(self, handoff_id: str) -> None:
        if (staged := self._staged.get(handoff_id)) is not None:
            self._leave(staged)
        self._port.abort(handoff_id)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Of slots."""
        self._area.give_back(block_ids)
        self._go_on()

    # --- the end

    async def close(self) -> None:
        """Waits for the copy in flight, whose pins go back, and frees the memory; hand-offs are over. Idempotent."""
        for staged in list(self._staged.values()):
            self._leave(staged)
        await self._idle.wait()
        self._thread.shutdown(wait=True)
        self._copies.close()
        self._area.close()

    def check_integrity(self) -> None:
        """Every slot is free or in use by one hand-off, and nobody waits for slots that are there."""
        self._area.check_integrity()
        for staged in self._turns:
            waits = not self._area.num_free or self._area.num_held(staged.open.handoff_id) == self._max_slots
            assert waits, f"hand-off {staged.open.handoff_id} waits for nothing"

    # --- what the engine says

    def _ask(self, ask: Callable[[Open, HolderListener], None], open: Open, listener: HolderListener) -> None:
        # In the books before the engine is asked: it may answer at once.
        staged = self._staged[open.handoff_id] = _Staged(open, listener)
        try:
            ask(open, partial(self._heard, staged))
        except BaseException:
            self._leave(staged)
            raise

    def _heard(self, staged: _Staged, event: WorkerEvent) -> None:
        match event:
            case Filled():
                self._filled(staged, event)
            case CachedPinned():
                self._cached_pinned(staged, event)
            case Computed():
                if not staged.is_over:
                    self._append(staged, event)
            case Started():
                staged.listener(event)
            case Failed():
                self._leave(staged)
                staged.listener(event)

    def _filled(self, staged: _Staged, event: Filled) -> None:
        known = staged.known.setdefault(event.group, staged.open.source.skip_blocks)
        # Skipped, or filled again after a preemption: neither is sent, and a hole is for the holder to find.
        num_known = len(event.block_ids) if staged.is_over else min(max(known - event.first, 0), len(event.block_ids))
        self._unpin_blocks(event.block_ids[:num_known])
        if num_known < len(event.block_ids):
            event = replace(event, first=event.first + num_known, block_ids=event.block_ids[num_known:])
            staged.known[event.group] = event.first + len(event.block_ids)
            self._append(staged, event)

    def _cached_pinned(self, staged: _Staged, event: CachedPinned) -> None:
        """Copies as many of the leading blocks as there are slots, and gives back the rest."""
        tables, source = event.block_tables, staged.open.source
        if staged.is_over or not isinstance(source, CachedSource):
            self._unpin_blocks(b for table in tables for b in table)
            return
        num_blocks = min(len(source.block_hashes), *(len(table) for table in tables))
        start = stop = min(source.skip_blocks, num_blocks)
        room = self._area.num_free
        while stop < num_blocks:
            room -= sum(table[stop] != NULL_BLOCK_ID for table in tables)
            if room < 0:
                break
            stop += 1
        self._unpin_blocks(b for table in tables for b in (*table[:start], *table[stop:]))
        block_ids = tuple(b for table in tables for b in table[start:stop])
        slot_ids = self._area.take(staged.open.handoff_id, block_ids)
        size = stop - start
        slots = tuple((NULL_BLOCK_ID,) * start + slot_ids[i * size : (i + 1) * size] for i in range(len(tables)))
        self._copy(staged, block_ids, slot_ids, event.fence, CachedPinned(slots))

    def _append(self, staged: _Staged, event: Filled | Computed) -> None:
        staged.waiting.append(event)
        if not staged.is_copying and staged not in self._turns:
            self._turns.append(staged)
        self._go_on()

    # --- copies

    def _go_on(self) -> None:
        """Begins whatever can begin: each hand-off copies one piece, and then lets the others."""
        for staged in list(self._turns):
            if staged in self._turns and self._take_turn(staged) and staged in self._turns:
                self._turns.remove(staged)

    def _take_turn(self, staged: _Staged) -> bool:
        """Whether it does not wait for slots."""
        event = staged.waiting[0]
        if isinstance(event, Computed):
            self._leave(staged)
            staged.listener(event)
            return True
        room = min(self._area.num_free, self._max_slots - self._area.num_held(staged.open.handoff_id), self._max_piece)
        size = 0
        for block_id in event.block_ids:
            room -= block_id != NULL_BLOCK_ID
            if room < 0:
                break
            size += 1
        if size == 0:
            return False
        block_ids, rest = event.block_ids[:size], event.block_ids[size:]
        end = event.first + size
        if rest:
            staged.waiting[0] = replace(event, first=end, block_ids=rest)
        else:
            staged.waiting.popleft()
        slot_ids = self._area.take(staged.open.handoff_id, block_ids)
        num_tokens = min(event.num_tokens, end * self._area.layout.block_size)
        self._copy(staged, block_ids, slot_ids, event.fence, Filled(event.first, slot_ids, num_tokens, event.group))
        return True

    def _copy(
        self,
        staged: _Staged,
        block_ids: Sequence[int],
        slot_ids: Sequence[int],
        fence: int | None,
        then: Filled | CachedPinned,
    ) -> None:
        staged.is_copying = True
        self._num_copying += 1
        self._idle.clear()
        # Null blocks stand for positions out of a sliding window: there is nothing to copy.
        real = [pair for pair in zip(block_ids, slot_ids, strict=True) if NULL_BLOCK_ID not in pair]
        blocks, slots = [block for block, _ in real], [slot for _, slot in real]

        def work() -> None:
            if blocks:
                self._copies.copy(blocks, slots, fence)

        def ended(future: asyncio.Future[None]) -> None:
            self._unpin_blocks(blocks)
            self._copied(staged, slots, then, future.exception())
            self._num_copying -= 1
            if not self._num_copying:
                self._idle.set()
            self._go_on()

        asyncio.get_running_loop().run_in_executor(self._thread, work).add_done_callback(ended)

    def _copied(
        self, staged: _Staged, slot_ids: Sequence[int], event: Filled | CachedPinned, error: BaseException | None
    ) -> None:
        staged.is_copying = False
        if error is not None:
            self._area.give_back(slot_ids)
            self._leave(staged)
            staged.listener(Failed(Code.INTERNAL, f"blocks could not be copied into host memory: {error}"))
            return
        if staged.waiting:
            self._turns.append(staged)
        if isinstance(event, CachedPinned):
            self._leave(staged)  # its only word
        staged.listener(event)  # if the hand-off is over meanwhile, the holder gives the slots back

    def _leave(self, staged: _Staged) -> None:
        """Nothing of the engine is passed on any more but `Failed`; slots that it holds are the holder's to unpin."""
        staged.is_over = True
        if self._staged.get(staged.open.handoff_id) is staged:
            del self._staged[staged.open.handoff_id]
        if staged in self._turns:
            self._turns.remove(staged)
        waiting, staged.waiting = staged.waiting, deque()
        for event in waiting:
            if isinstance(event, Filled):
                self._unpin_blocks(event.block_ids)

    def _unpin_blocks(self, block_ids: Iterable[int]) -> None:
        if real := tuple(b for b in block_ids if b != NULL_BLOCK_ID):
            self._port.unpin(real)

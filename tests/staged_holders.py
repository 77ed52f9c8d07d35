"""A worker whose hand-offs are all staged: its engine, the copies, and its consumers, one event at a time.

A block's content says whose it is and which; a block without a pin is overwritten at once, and so is a slot that is
free. So what is confirmed although it was read too late, or staged too late, is seen when it happens.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import numpy as np

from handoffs import BLOCK_SIZE, LAYOUT, FakeHolderEngine, an_open, cached, computed, pool_handle, prefill
from kvtransfer.errors import Code, TransferError
from kvtransfer.events import CachedPinned, CloseStream, Failed, Filled, Started
from kvtransfer.messages import Accepted, Complete, Confirmed, HolderMessage, Open, PrefillSource, Pulled, Ready
from kvtransfer.ports import HolderListener, HolderPool
from kvtransfer.provider import Provider
from kvtransfer.staging import StagedPort
from kvtransfer.staging_area import StagingArea

BYTES = LAYOUT.bytes_per_block
POISON = 255


class HostStagingCopies:
    """Out of a pool in host memory. Implements `staging_area.StagingCopies`."""

    def __init__(self, pool: memoryview, slots: memoryview, bytes_per_block: int) -> None:
        self._pool = np.frombuffer(pool, np.uint8)
        self._pool = self._pool[: len(self._pool) // bytes_per_block * bytes_per_block].reshape(-1, bytes_per_block)
        self._slots = np.frombuffer(slots, np.uint8).reshape(-1, bytes_per_block)
        self.fences: list[int | None] = []
        self.fails = False

    def copy(self, block_ids: Sequence[int], slot_ids: Sequence[int], fence: int | None) -> None:
        self.fences.append(fence)
        if self.fails:
            raise TransferError("the GPU is on fire")
        self._slots[list(slot_ids)] = self._pool[list(block_ids)]

    def close(self) -> None:
        self._pool = self._slots = np.empty((0, 1), np.uint8)


class StepExecutor(Executor):
    """Does what it is given when the test says so, in order."""

    def __init__(self) -> None:
        self.todo: list[tuple[Callable[..., Any], tuple[Any, ...], Future[Any]]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.todo.append((function, args, future))
        return future

    def step(self) -> None:
        function, args, future = self.todo.pop(0)
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        assert not self.todo, "closed under a copy"


class StagedEngine(FakeHolderEngine):
    """With blocks that have contents, and are used again as soon as nobody has a pin."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.memory = bytearray(num_blocks * BYTES)
        self.blocks = np.frombuffer(self.memory, np.uint8).reshape(num_blocks, BYTES)
        self.tables: dict[str, list[int]] = {}  # by hand-off: what it has filled

    def pin_cached(self, open: Open, listener: HolderListener) -> None:
        self._remember(open, listener)

    def new_block(self, content: int) -> int:
        block_id = next(b for b in range(1, len(self.blocks)) if not self.pins[b])
        self.pins[block_id] += 1
        self.blocks[block_id] = content
        return block_id

    def unpin(self, block_ids: Sequence[int]) -> None:
        super().unpin(block_ids)
        for block_id in block_ids:
            if not self.pins[block_id]:
                self.blocks[block_id] = POISON


class Taker:
    """One hand-off and its consumer. Implements `provider.HolderStream`."""

    def __init__(self, world: "StagedHolders", number: int, open: Open) -> None:
        self.world = world
        self.number = number
        self.open_message = open
        self.messages: list[HolderMessage] = []
        self.closed: CloseStream | None = None
        self.num_blocks = 0
        self.num_confirmed = open.source.skip_blocks
        self.announced: list[tuple[int, int]] = []  # index, slot: not read yet
        self.read_blocks: dict[int, int] = {}
        self.holding = world.provider.open(open, self)

    def content(self, index: int) -> int:
        return (self.number * 37 + index) % (POISON - 1) + 1

    # --- HolderStream

    def send(self, message: HolderMessage) -> None:
        assert self.closed is None
        self.messages.append(message)
        match message:
            case Accepted():
                self.num_blocks = message.num_blocks
                assert message.pool == self.world.staged.pool.handle
            case Ready():
                assert message.fence is None
                self.announced += list(enumerate(message.block_ids, message.first))
            case Confirmed():
                for index in range(self.num_confirmed, message.num_blocks):
                    assert self.read_blocks[index] == self.content(index), "what is confirmed is right"
                self.num_confirmed = max(self.num_confirmed, message.num_blocks)

    def close(self, code: Code, message: str) -> None:
        self.closed = CloseStream(code, message)

    # --- what it does

    def read(self) -> None:
        for index, slot in self.announced:
            block = self.world.slots[slot]
            assert (block == block[0]).all()
            self.read_blocks[index] = int(block[0])
        self.announced.clear()

    def pull(self) -> None:
        self.read()
        if self.closed is None and self.read_blocks and max(self.read_blocks) >= self.num_confirmed:
            self.holding.pulled(Pulled(max(self.read_blocks) + 1))

    def leave(self) -> None:
        self.closed = self.closed or CloseStream(Code.CANCELLED)
        self.holding.stream_ended(Code.CANCELLED, "the consumer left")


class StagedHolders:
    """Everything that a test lets happen; what is impossible at the moment does nothing."""

    def __init__(self, num_slots: int, num_blocks: int = 400) -> None:
        self.engine = StagedEngine(num_blocks)
        self.area = StagingArea(LAYOUT, num_slots * BYTES)
        self.slots = np.frombuffer(self.area.memory.buffer, np.uint8).reshape(-1, BYTES)
        self.copies = HostStagingCopies(memoryview(self.engine.memory), self.area.memory.buffer, BYTES)
        self.staged = StagedPort(self.engine, self.area, self.copies, "holder")
        self.executor = StepExecutor()
        self.staged._thread = self.executor  # type: ignore[assignment]
        self.provider = Provider(HolderPool(pool_handle(num_blocks), LAYOUT), self.engine, staged=self.staged)
        self.takers: list[Taker] = []

    def open_prefill(self, num_blocks: int, skip_blocks: int = 0) -> Taker:
        return self._open(prefill(num_blocks * BLOCK_SIZE - 1, min(skip_blocks, num_blocks)))

    def open_cached(self, num_blocks: int, skip_blocks: int = 0) -> Taker:
        return self._open(cached(num_blocks, min(skip_blocks, num_blocks)))

    def _open(self, source: Any) -> Taker:
        number = len(self.takers)
        open = an_open(source, handoff_id=f"handoff-{number}", request_id=f"request-{number}")
        open = replace(open, staged=True)
        taker = Taker(self, number, open)
        self.takers.append(taker)
        return taker

    # --- the engine, of hand-off `number`

    def start(self, number: int) -> None:
        if number < len(self.takers):
            self._say(number, Started())

    def fill(self, number: int, count: int) -> None:
        """The next blocks of a prefill; or the whole of a cached prefix."""
        if number >= len(self.takers):
            return
        taker = self.takers[number]
        name, source = taker.open_message.handoff_id, taker.open_message.source
        if not isinstance(source, PrefillSource):
            if name not in self.engine.tables:  # looked up once
                self.engine.tables[name] = []
                table = tuple(self.engine.new_block(taker.content(i)) for i in range(count))
                self._say(number, CachedPinned((table,), fence=number))
            return
        table_so_far = self.engine.tables.setdefault(name, [])
        first, last = len(table_so_far), -(-len(source.token_ids) // BLOCK_SIZE)
        if name in self.engine.listeners and first < last:
            blocks = tuple(self.engine.new_block(taker.content(i)) for i in range(first, min(first + count, last)))
            table_so_far += blocks
            num_tokens = min(len(table_so_far) * BLOCK_SIZE, len(source.token_ids))
            self._say(number, Filled(first, blocks, num_tokens, fence=number))
            if len(table_so_far) == last:
                self._say(number, computed(source))

    def preempt(self, number: int) -> None:
        """It fills everything again."""
        if number < len(self.takers):
            name = self.takers[number].open_message.handoff_id
            source = self.takers[number].open_message.source
            if isinstance(source, PrefillSource) and len(self.engine.tables.get(name, [])) * BLOCK_SIZE < len(
                source.token_ids
            ):
                self.engine.tables[name] = []

    def engine_fails(self, number: int) -> None:
        if number < len(self.takers):
            self._say(number, Failed(Code.INTERNAL, "the engine failed"))

    def _say(self, number: int, event: Any) -> None:
        self.engine.listeners[self.takers[number].open_message.handoff_id](event)

    # --- the rest

    async def copy(self) -> None:
        """The next copy into slots ends."""
        if self.executor.todo:
            self.executor.step()
            for _ in range(3):  # its end comes to the loop
                await asyncio.sleep(0)
        self.check()

    def consumer(self, number: int, does: Callable[[Taker], None]) -> None:
        if number < len(self.takers):
            does(self.takers[number])

    def check(self) -> None:
        self.staged.check_integrity()
        for slot in self.area._free:
            self.slots[slot] = POISON

    async def settle(self) -> None:
        """No more faults: until nothing happens any more."""
        for _ in range(1000):
            before = (len(self.executor.todo), [len(t.messages) for t in self.takers])
            for number, taker in enumerate(self.takers):
                if taker.closed is None:
                    self.fill(number, 3)
                taker.pull()
            await self.copy()
            if before == (len(self.executor.todo), [len(t.messages) for t in self.takers]) and not before[0]:
                return
        raise AssertionError("it does not come to an end")

    async def close(self) -> None:
        """Everybody leaves; everything must have come back."""
        for taker in self.takers:
            taker.leave()
        self.provider.close()
        while self.executor.todo:
            await self.copy()
        await self.staged.close()
        self.check()
        assert self.engine.num_pins == 0, self.engine.pins
        assert self.area.num_free == self.area.num_slots
        assert self.provider.num_active == 0


def complete_of(taker: Taker) -> Complete | None:
    return next((m for m in taker.messages if isinstance(m, Complete)), None)

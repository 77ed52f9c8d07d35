"""One request, a consumer and its holders in virtual time: both machines, two pools, a network that breaks.

A block's content says what it is: `("kv", i)` is what block i of the request must hold, wherever it was computed; a
block that is given back is overwritten at once. So a copy that read too late, a block committed too early, or a write
into a block that belongs to somebody else is seen when it happens.

Nothing here chooses: a test calls the methods, in any order; what is impossible at the moment does nothing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from engine.executor import SampledToken
from handoffs import BLOCK_SIZE, FINGERPRINT, LAYOUT, computed, prefill
from kvtransfer.consumer import Consumer
from kvtransfer.errors import Code
from kvtransfer.events import (
    AbortCompute,
    AbortRequested,
    CachedPinned,
    CloseStream,
    Commit,
    CommitBlocks,
    ConsumerAction,
    ConsumerEvent,
    Copy,
    CopyEnded,
    DeliverFirstTokens,
    End,
    Failed,
    Filled,
    HolderAction,
    HolderEvent,
    LoseHolder,
    PinCached,
    Send,
    Started,
    StartPrefill,
    StreamEnded,
    Tick,
    TransferStats,
    Unpin,
)
from kvtransfer.handle import PoolHandle
from kvtransfer.holder import Holder
from kvtransfer.messages import CachedSource, HandoffTimes, Open, PrefillSource, Pulled

TIMES = HandoffTimes(lease_s=30.0, answer_s=10.0, deadline_s=120.0)
KEEPALIVE_S = 6.0  # a stream that is cut is noticed by then, on both sides
NUM_BLOCKS = 5
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE - 1
MAX_REPAIRS = 3

Content = tuple[str, int]


class HolderPool:
    """Blocks with reference counts; what nobody refers to is overwritten at once."""

    def __init__(self, num_blocks: int) -> None:
        self.contents: list[Content] = [("nothing", i) for i in range(num_blocks)]
        self.refs = [0] * num_blocks
        self._poison = 0

    def allocate(self) -> int:
        # The block that was let go last: what is still read from there is wrong at once.
        block_id = max(i for i in range(1, len(self.refs)) if self.refs[i] == 0)
        self.refs[block_id] = 1
        return block_id

    def pin(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert self.refs[block_id] > 0, f"block {block_id} was pinned after it was let go"
            self.refs[block_id] += 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert self.refs[block_id] > 0, f"block {block_id} was let go twice"
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                self._poison += 1
                self.contents[block_id] = ("poison", self._poison)


class HolderEngine:
    """What computes or looks up for one hand-off: commands take effect with the next step, reports arrive later."""

    def __init__(self, pool: HolderPool, open: Open, num_cached: int) -> None:
        self.pool = pool
        self.open = open
        self.posted: deque[Callable[[], None]] = deque()
        self.reports: deque[HolderEvent] = deque()
        self.block_ids: list[int] = []  # that the engine itself refers to
        self.num_cached = num_cached
        self.is_computing = False
        self.was_aborted = False

    def step(self, chunk: int) -> None:
        while self.posted:
            self.posted.popleft()()
        if self.is_computing:
            self._compute(chunk)

    def start(self) -> None:
        if self.was_aborted:
            return
        self.is_computing = True
        self.reports.append(Started())

    def _compute(self, chunk: int) -> None:
        first = len(self.block_ids)
        for i in range(first, min(first + chunk, NUM_BLOCKS)):
            block_id = self.pool.allocate()
            self.pool.contents[block_id] = ("kv", i)
            self.block_ids.append(block_id)
        self._report(first)
        if len(self.block_ids) == NUM_BLOCKS:
            self.reports.append(computed(self.open.source))
            self.finish()

    def _report(self, first: int) -> None:
        block_ids = tuple(self.block_ids[first:])
        self.pool.pin(block_ids)
        self.reports.append(Filled(first, block_ids, min(len(self.block_ids) * BLOCK_SIZE, NUM_TOKENS)))

    def preempt(self) -> None:
        """Everything is computed again, in other blocks, and reported from the beginning."""
        if self.is_computing:
            self.pool.unpin(self.block_ids)
            self.block_ids = []

    def look_up(self) -> None:
        for i in range(self.num_cached):
            block_id = self.pool.allocate()
            self.pool.contents[block_id] = ("kv", i)
            self.block_ids.append(block_id)
        self.pool.pin(self.block_ids)
        self.reports.append(CachedPinned((tuple(self.block_ids),)))
        self.finish()  # from now on only the pins keep them

    def abort(self) -> None:
        self.was_aborted = True
        self.finish()

    def fail(self) -> None:
        if self.is_computing:
            self.reports.append(Failed(Code.INTERNAL, "the engine failed"))
            self.finish()

    def finish(self) -> None:
        self.is_computing = False
        self.pool.unpin(self.block_ids)
        self.block_ids = []


@dataclass
class Attempt:
    """One hand-off: its machines, the stream between them, the holder's engine."""

    open: Open
    consumer: Consumer
    holder: Holder | None
    engine: HolderEngine
    to_holder: deque[Open | Pulled] = field(default_factory=deque)
    to_consumer: deque[object] = field(default_factory=deque)
    cut_at: float | None = None  # when the stream broke
    consumer_knows: bool = False
    holder_knows: bool = False
    copy: Copy | None = None
    read: list[Content] | None = None
    has_ended: bool = False  # the consumer has reported its end
    holder_is_dead: bool = False


class World:
    def __init__(
        self,
        source: str = "prefill",
        num_cached: int = NUM_BLOCKS,
        skip_blocks: int = 0,
        num_choices: int = 1,
        prompt_logprobs: int | None = None,
    ) -> None:
        self.now = 0.0
        self.holder_pool = HolderPool(40)
        self.targets = list(range(100, 100 + NUM_BLOCKS + 1))  # one for growth
        self.consumer_pool: dict[int, Content] = {t: ("nothing", t) for t in self.targets}
        self.owner = "request"  # of the targets
        self.num_committed = skip_blocks
        self.first_tokens: tuple[SampledToken, ...] = ()
        self.outcome: str | None = None
        self.num_repairs = 0
        self.num_messages = 0
        self.cut_before_message: int | None = None
        self.source = source
        self.num_cached = num_cached
        self.num_choices = num_choices
        self.prompt_logprobs = prompt_logprobs
        self.attempts: list[Attempt] = []
        for i in range(skip_blocks):
            self.consumer_pool[self.targets[i]] = ("kv", i)
        self._begin(skip_blocks)

    @property
    def attempt(self) -> Attempt:
        return self.attempts[-1]

    # --- what a test may let happen

    def deliver_to_holder(self) -> None:
        for attempt in self.attempts:
            if attempt.to_holder and attempt.cut_at is None and not attempt.holder_is_dead:
                message = attempt.to_holder.popleft()
                if isinstance(message, Open):
                    attempt.holder = Holder(
                        message, _handle(), block_size=BLOCK_SIZE, fingerprint=FINGERPRINT, times=TIMES
                    )
                    self._do_holder(attempt, attempt.holder.start(self.now))
                else:
                    self._tell_holder(attempt, message)
                return

    def deliver_to_consumer(self) -> None:
        for attempt in self.attempts:
            if attempt.to_consumer and attempt.cut_at is None:
                message = attempt.to_consumer.popleft()
                if isinstance(message, StreamEnded):
                    attempt.cut_at, attempt.consumer_knows = self.now, True
                self._tell_consumer(attempt, message)  # type: ignore[arg-type]
                return

    def go_on(self, num_steps: int) -> None:
        """That many steps of what should happen."""
        steps = (
            self.deliver_to_holder,
            self.engine_step,
            self.engine_report,
            self.deliver_to_consumer,
            self.engine_report,
            self.deliver_to_consumer,
            self.copy_ends,
        )
        for _, step in zip(range(num_steps), cycle(steps), strict=False):
            step()

    def engine_step(self, chunk: int = 2) -> None:
        for attempt in self.attempts:
            if not attempt.holder_is_dead:
                attempt.engine.step(chunk)

    def engine_report(self) -> None:
        for attempt in self.attempts:
            if attempt.engine.reports and not attempt.holder_is_dead:
                self._tell_holder(attempt, attempt.engine.reports.popleft())
                return

    def preempt(self) -> None:
        self.attempt.engine.preempt()

    def engine_fails(self) -> None:
        self.attempt.engine.fail()

    def copy_reads(self) -> None:
        for attempt in self.attempts:
            if attempt.copy is not None and attempt.read is None:
                attempt.read = [self.holder_pool.contents[b] for b in attempt.copy.source_ids]

    def copy_ends(self) -> None:
        for attempt in self.attempts:
            if attempt.copy is None:
                continue
            self.copy_reads()
            assert attempt.read is not None
            copy, read = attempt.copy, attempt.read
            attempt.copy = attempt.read = None
            assert self.owner == "request", "a copy was written into blocks of somebody else"
            for target, content in zip(copy.target_ids, read, strict=True):
                self.consumer_pool[target] = content
            self._tell_consumer(attempt, CopyEnded(TransferStats(0.1, 1, 1)))

    def advance(self, seconds: float) -> None:
        """Time passes; who has a deadline, and who hears nothing from a cut stream, notices."""
        self.now += seconds
        for attempt in self.attempts:
            if attempt.cut_at is not None and self.now >= attempt.cut_at + KEEPALIVE_S:
                self.notify_holder()
                self.notify_consumer()
        self.tick()

    def tick(self) -> None:
        for attempt in self.attempts:
            self._tell_consumer(attempt, Tick())
            self._tell_holder(attempt, Tick())

    def abort(self) -> None:
        self._tell_consumer(self.attempt, AbortRequested())

    def cut(self) -> None:
        """The stream breaks, with all that was under way; neither side knows yet."""
        if self.attempt.cut_at is None:
            self.attempt.cut_at = self.now

    def notify_holder(self) -> None:
        for attempt in self.attempts:
            if attempt.cut_at is not None:
                attempt.holder_knows = True
                self._tell_holder(attempt, StreamEnded(Code.UNAVAILABLE, "cut"))

    def notify_consumer(self) -> None:
        for attempt in self.attempts:
            if attempt.cut_at is not None:
                attempt.consumer_knows = True
                self._tell_consumer(attempt, StreamEnded(Code.UNAVAILABLE, "cut"))

    def kill_holder(self) -> None:
        """Its memory stays readable while it is mapped; nothing else of it is left."""
        attempt = self.attempt
        if not attempt.holder_is_dead:
            attempt.holder_is_dead = True
            if attempt.cut_at is None:
                attempt.cut_at = self.now

    def repeat_old_events(self) -> None:
        """What was heard once is heard again."""
        for attempt in self.attempts:
            if attempt.has_ended:
                for event in (StreamEnded(Code.OK), CopyEnded(TransferStats()), AbortRequested(), Tick()):
                    assert attempt.consumer.handle(event, self.now) == []
            if attempt.holder is not None and attempt.holder.is_over:
                for happened in (StreamEnded(Code.OK), Pulled(1), Failed(Code.INTERNAL, ""), Tick(), Started()):
                    assert attempt.holder.handle(happened, self.now) == []

    # --- the end

    def settle(self) -> float:
        """No more faults: lets everything come to its end. How long that took."""
        began = self.now
        for _ in range(1000):
            before = self._fingerprint()
            self.deliver_to_holder()
            self.engine_step()
            self.engine_report()
            self.deliver_to_consumer()
            self.copy_ends()
            if self._fingerprint() != before:
                continue
            if all(self._is_over(a) for a in self.attempts):
                return self.now - began
            self.advance(1.0)
        raise AssertionError("it does not come to an end")

    def check_whole(self) -> None:
        """After `settle`: nothing is held by anybody who is over, and what is said to be real is."""
        if not any(a.holder_is_dead for a in self.attempts):
            assert sum(self.holder_pool.refs) == 0, self.holder_pool.refs
        for attempt in self.attempts:
            assert attempt.copy is None
            assert attempt.has_ended
            assert attempt.holder is None or attempt.holder_is_dead or attempt.holder.pinned == []
        assert self.outcome in ("committed", "aborted", "failed")
        assert len(self.first_tokens) in (0, self.num_choices)
        self._check_committed()

    def _is_over(self, attempt: Attempt) -> bool:
        holder_is_over = attempt.holder is None or attempt.holder_is_dead or attempt.holder.is_over
        return attempt.consumer.is_over and holder_is_over and attempt.copy is None

    def _fingerprint(self) -> tuple[object, ...]:
        return tuple(
            (
                a.consumer.state,
                a.consumer.num_confirmed_blocks,
                a.holder and a.holder.state,
                len(a.to_holder),
                len(a.to_consumer),
                len(a.engine.reports),
                len(a.engine.posted),
                len(a.engine.block_ids),
                a.engine.is_computing,
                a.copy,
            )
            for a in self.attempts
        )

    # --- inside

    def _begin(self, skip_blocks: int) -> None:
        source: PrefillSource | CachedSource
        if self.source == "prefill":
            source = prefill(NUM_TOKENS, skip_blocks, self.num_choices, self.prompt_logprobs)
        else:
            source = CachedSource(tuple(bytes([i]) * 16 for i in range(NUM_BLOCKS)), skip_blocks)
        open = Open(f"handoff-{len(self.attempts)}", "request", "consumer", FINGERPRINT, 100.0, source)
        consumer = Consumer(
            open,
            [self.targets],
            LAYOUT,
            times=TIMES,
            first_tokens_delivered=bool(self.first_tokens),
            max_bytes_per_copy=2 * LAYOUT.bytes_per_block,
        )
        attempt = Attempt(open, consumer, None, HolderEngine(self.holder_pool, open, self.num_cached))
        self.attempts.append(attempt)
        self._do_consumer(attempt, consumer.start(self.now))

    def _tell_consumer(self, attempt: Attempt, event: ConsumerEvent) -> None:
        self._do_consumer(attempt, attempt.consumer.handle(event, self.now))

    def _tell_holder(self, attempt: Attempt, event: HolderEvent) -> None:
        if attempt.holder is not None and not attempt.holder_is_dead:
            self._do_holder(attempt, attempt.holder.handle(event, self.now))

    def _send(self, attempt: Attempt, queue: deque[object] | deque[Open | Pulled], message: object) -> None:
        if self.num_messages == self.cut_before_message and attempt.cut_at is None:
            attempt.cut_at = self.now
        self.num_messages += 1
        if attempt.cut_at is None:
            queue.append(message)  # type: ignore[arg-type]

    def _do_consumer(self, attempt: Attempt, actions: Sequence[ConsumerAction]) -> None:
        for action in actions:
            assert not attempt.has_ended, f"{action} after the end was reported"
            match action:
                case Send():
                    self._send(attempt, attempt.to_holder, action.message)
                case CloseStream():
                    if attempt.cut_at is None:
                        attempt.cut_at = self.now
                    attempt.consumer_knows = True
                case Copy():
                    assert attempt.copy is None
                    attempt.copy = action
                case DeliverFirstTokens():
                    assert not self.first_tokens, "first tokens are delivered once"
                    said = computed(attempt.open.source)
                    assert action.complete.prompt_logprobs == said.prompt_logprobs
                    self.first_tokens = action.complete.first_tokens
                    assert self.first_tokens == said.first_tokens
                case CommitBlocks():
                    assert action.num_blocks > self.num_committed
                    self.num_committed = action.num_blocks
                    self._check_committed()
                case Commit():
                    attempt.has_ended = True
                    assert self.num_committed >= action.result.num_blocks
                    self.outcome = "committed"
                case LoseHolder():
                    attempt.has_ended = True
                    assert attempt.copy is None
                    assert action.lost.num_confirmed_blocks == self.num_committed
                    self._repair()
                case End():
                    attempt.has_ended = True
                    assert attempt.copy is None
                    self._give_back("aborted")

    def _repair(self) -> None:
        self.num_repairs += 1
        if self.num_repairs <= MAX_REPAIRS:
            self._begin(self.num_committed)
        else:
            self._give_back("failed")

    def _give_back(self, outcome: str) -> None:
        self._check_committed()
        self.outcome = outcome
        self.owner = "somebody else"

    def _check_committed(self) -> None:
        held = [self.consumer_pool[t] for t in self.targets[: self.num_committed]]
        assert held == [("kv", i) for i in range(self.num_committed)]

    def _do_holder(self, attempt: Attempt, actions: Sequence[HolderAction]) -> None:
        engine = attempt.engine
        for action in actions:
            match action:
                case Send():
                    self._send(attempt, attempt.to_consumer, action.message)
                case CloseStream():
                    self._send(attempt, attempt.to_consumer, StreamEnded(action.code, action.message))
                case StartPrefill():
                    engine.posted.append(engine.start)
                case PinCached():
                    engine.posted.append(engine.look_up)
                case AbortCompute():
                    engine.posted.append(engine.abort)
                case Unpin():
                    engine.posted.append(lambda ids=action.block_ids: engine.pool.unpin(ids))  # type: ignore[misc]


def _handle() -> PoolHandle:
    return PoolHandle("holder", "fake", b"", 0, 40 * LAYOUT.bytes_per_block, LAYOUT.bytes_per_block, FINGERPRINT)

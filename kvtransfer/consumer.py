"""The consumer's end of one hand-off, as a pure state machine: events in, actions out, the clock passed in.

    RESERVED ──> OPEN ──> RECEIVING ──> COMMITTED       all confirmed, and `Complete` has come
        └──────────┴───────────┴──> ABORTING ──> ENDED  aborted, or the holder lost

RESERVED: the target blocks belong to the request. OPEN: `Open` is sent. RECEIVING: accepted; announced blocks are
copied, at most one copy in flight, which takes along whatever was announced while the last one ran. ABORTING: it is
over, but a copy is still running: it starts no new one, and waits for that one to end. Only then is the end reported,
because then the blocks may go to somebody else.

Nothing counts before it is confirmed: `num_confirmed_blocks` is what a next hand-off may skip.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from engine.kvcache.block import NULL_BLOCK_ID
from engine.memory import KVLayout
from kvtransfer.errors import Code, ProtocolViolation
from kvtransfer.events import (
    AbortRequested,
    CloseStream,
    Commit,
    CommitBlocks,
    ConsumerAction,
    ConsumerEvent,
    Copy,
    CopyEnded,
    DeliverFirstTokens,
    End,
    HandoffResult,
    HolderLost,
    LoseHolder,
    Send,
    StreamEnded,
    Tick,
    TransferStats,
)
from kvtransfer.handle import PoolHandle
from kvtransfer.messages import (
    Accepted,
    CachedSource,
    Complete,
    Confirmed,
    HandoffTimes,
    HolderMessage,
    Open,
    PrefillSource,
    Pulled,
    Ready,
)

# A copy in flight delays an abort, and other hand-offs of the same copying thread: a few milliseconds are enough to
# make its fixed cost small.
MAX_BYTES_PER_COPY = 16 << 20


class ConsumerState(Enum):
    RESERVED = "reserved"
    OPEN = "open"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    ABORTING = "aborting"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class _Announced:
    group: int
    source_id: int
    target_id: int
    fence: int | None


class Consumer:
    """One hand-off into blocks that are reserved. `handle` may be called with any event in any state."""

    def __init__(
        self,
        open: Open,
        block_tables: Sequence[Sequence[int]],
        layout: KVLayout,
        *,
        times: HandoffTimes | None = None,
        first_tokens_delivered: bool = False,
        max_bytes_per_copy: int = MAX_BYTES_PER_COPY,
    ) -> None:
        """`block_tables`: the request's own blocks, one table a KV cache group, not shorter than the hand-off.

        Raises:
            ValueError: the tables cannot hold what `open` asks for.
        """
        num_wanted = _num_blocks_wanted(open, layout.block_size)
        for table in block_tables:
            if len(table) < num_wanted:
                raise ValueError(f"{num_wanted} blocks are to be received into a table of {len(table)}")
        if not block_tables:
            raise ValueError("a request has a block table for each KV cache group, at least one")
        if open.source.skip_blocks > num_wanted:
            raise ValueError(f"skip_blocks is {open.source.skip_blocks}, of {num_wanted} blocks")
        self.open = open
        self.state = ConsumerState.RESERVED
        self.first_tokens_delivered = first_tokens_delivered
        self.stats = TransferStats()
        self._tables = [tuple(table) for table in block_tables]
        self._layout = layout
        self._times = times or HandoffTimes()
        self._max_blocks_per_copy = max(1, max_bytes_per_copy // layout.bytes_per_block)
        self._num_blocks_wanted = num_wanted
        self._num_blocks = 0  # known with `Accepted`
        self._pool: PoolHandle | None = None
        self._num_announced = [0] * len(self._tables)
        self._num_copied = [0] * len(self._tables)
        self._num_pulled = 0  # as told to the holder
        self._num_confirmed = open.source.skip_blocks
        self._all_confirmed = False
        self._complete: Complete | None = None
        self._waiting: deque[_Announced] = deque()
        self._in_flight: list[_Announced] = []
        self._lost: tuple[Code, str] | None = None
        self._deadline = 0.0
        self._answer_until: float | None = None

    @property
    def num_confirmed_blocks(self) -> int:
        """Leading blocks that are real: confirmed by this holder, or there before."""
        return self._num_confirmed

    @property
    def is_copying(self) -> bool:
        """Whether a copy into the target blocks is in flight."""
        return bool(self._in_flight)

    @property
    def is_over(self) -> bool:
        return self.state in (ConsumerState.COMMITTED, ConsumerState.ENDED)

    @property
    def next_deadline(self) -> float | None:
        """When to call `handle(Tick())` at the latest; None: never."""
        if self.state not in (ConsumerState.OPEN, ConsumerState.RECEIVING):
            return None
        return self._deadline if self._answer_until is None else min(self._deadline, self._answer_until)

    # --- events

    def start(self, now: float) -> list[ConsumerAction]:
        """Opens the hand-off; called once. If it was aborted before, there is nothing to open."""
        if self.state is not ConsumerState.RESERVED:
            return []
        self.state = ConsumerState.OPEN
        self._deadline = now + (self.open.timeout_s or self._times.deadline_s)
        self._answer_until = now + self._times.answer_s
        return [Send(self.open)]

    def handle(self, event: ConsumerEvent, now: float) -> list[ConsumerAction]:
        """What to do about an event, in this order. Never fails, whatever the event and the state."""
        match event:
            case CopyEnded():
                return self._copy_ended(event, now)
            case AbortRequested():
                return self._abort()
            case StreamEnded():
                message = event.message
                if event.code is Code.OK and not self.is_over:
                    message = "the holder ended the hand-off before it was complete"
                return self._lose(event.code or Code.UNAVAILABLE, message, close=False)
            case Tick():
                return self._tick(now)
            case Accepted() | Ready() | Complete() | Confirmed():
                if self.state not in (ConsumerState.OPEN, ConsumerState.RECEIVING):
                    return []
                try:
                    return self._holder_says(event, now)
                except ProtocolViolation as error:
                    return self._lose(error.code, error.message)

    def _holder_says(self, message: HolderMessage, now: float) -> list[ConsumerAction]:
        if isinstance(message, Accepted):
            return self._accepted(message, now)
        if self._pool is None:
            raise ProtocolViolation(f"the holder sent {type(message).__name__} before Accepted")
        match message:
            case Ready():
                return self._ready(message)
            case Complete():
                return self._completed(message)
            case Confirmed():
                return self._confirmed(message, now)

    def _accepted(self, message: Accepted, now: float) -> list[ConsumerAction]:
        if self._pool is not None:
            return []
        pool, layout = message.pool, self._layout
        if pool.bytes_per_block != layout.bytes_per_block or pool.fingerprint != layout.fingerprint:
            raise ProtocolViolation(
                f"the holder's blocks are {pool.bytes_per_block} bytes of {pool.fingerprint.hex()}, "
                f"ours {layout.bytes_per_block} of {layout.fingerprint.hex()}"
            )
        is_prefill = isinstance(self.open.source, PrefillSource)
        if message.num_blocks > self._num_blocks_wanted or (
            is_prefill and message.num_blocks < self._num_blocks_wanted
        ):
            raise ProtocolViolation(f"the holder offers {message.num_blocks} blocks of {self._num_blocks_wanted}")
        self.state = ConsumerState.RECEIVING
        self._pool = pool
        self._num_blocks = message.num_blocks
        start = min(self.open.source.skip_blocks, self._num_blocks)
        self._num_announced = [start] * len(self._tables)
        self._num_copied = [start] * len(self._tables)
        self._num_pulled = start  # where everything is skipped, all is confirmed without a copy
        self._answer_until = None
        return []

    def _ready(self, message: Ready) -> list[ConsumerAction]:
        assert self._pool is not None
        if not 0 <= message.group < len(self._tables):
            raise ProtocolViolation(f"the holder announced group {message.group} of {len(self._tables)}")
        announced = self._num_announced[message.group]
        end = message.first + len(message.block_ids)
        if message.first != announced or end > self._num_blocks:
            raise ProtocolViolation(
                f"the holder announced blocks [{message.first}, {end}) of {self._num_blocks} after {announced}"
            )
        # What it says is an address in its memory: never past the end of it.
        if any(not NULL_BLOCK_ID <= b < self._pool.num_blocks for b in message.block_ids):
            raise ProtocolViolation(f"the holder announced a block outside its pool of {self._pool.num_blocks}")
        targets = self._tables[message.group][announced:end]
        self._waiting.extend(
            _Announced(message.group, source_id, target_id, message.fence)
            for source_id, target_id in zip(message.block_ids, targets, strict=True)
        )
        self._num_announced[message.group] = end
        return self._next_copy()

    def _completed(self, message: Complete) -> list[ConsumerAction]:
        if self._complete is not None:
            return []
        source = self.open.source
        if min(self._num_announced) < self._num_blocks:
            raise ProtocolViolation(f"complete with {min(self._num_announced)} of {self._num_blocks} blocks announced")
        if isinstance(source, PrefillSource):
            num_tokens, num_first = len(source.token_ids), source.num_choices
        else:
            num_tokens, num_first = self._num_blocks * self._layout.block_size, 0
        if message.num_tokens != num_tokens or len(message.first_tokens) != num_first:
            raise ProtocolViolation(
                f"the holder completed {message.num_tokens} tokens of {num_tokens}, "
                f"with {len(message.first_tokens)} first tokens of {num_first}"
            )
        if isinstance(source, PrefillSource):
            _check_prompt_logprobs(source, message)
        self._complete = message
        actions: list[ConsumerAction] = []
        if message.first_tokens and not self.first_tokens_delivered:
            self.first_tokens_delivered = True
            actions.append(DeliverFirstTokens(message))
        return actions + self._commit_if_all_is_real()

    def _confirmed(self, message: Confirmed, now: float) -> list[ConsumerAction]:
        if message.num_blocks > self._num_pulled:
            raise ProtocolViolation(f"confirmed {message.num_blocks} blocks of which {self._num_pulled} were pulled")
        actions: list[ConsumerAction] = []
        if message.num_blocks > self._num_confirmed:
            self._num_confirmed = message.num_blocks
            actions.append(CommitBlocks(message.num_blocks))
            waits = self._num_confirmed < self._num_pulled
            self._answer_until = now + self._times.answer_s if waits else None
        self._all_confirmed = self._all_confirmed or message.num_blocks >= self._num_blocks
        return actions + self._commit_if_all_is_real()

    def _copy_ended(self, event: CopyEnded, now: float) -> list[ConsumerAction]:
        if not self._in_flight:
            return []
        ended, self._in_flight = self._in_flight, []
        self.stats += event.stats
        if self.state is ConsumerState.ABORTING:
            return self._report_end()
        if event.error is not None:
            return self._lose(event.error.code, event.error.message)
        for block in ended:
            self._num_copied[block.group] += 1
        return self._tell_pulled(now) + self._next_copy()

    def _tick(self, now: float) -> list[ConsumerAction]:
        deadline = self.next_deadline
        if deadline is None or now < deadline:
            return []
        if now >= self._deadline:
            return self._lose(Code.DEADLINE_EXCEEDED, "the hand-off did not end within its deadline")
        waited_for = "accept the hand-off" if self.state is ConsumerState.OPEN else "confirm a copy"
        return self._lose(Code.DEADLINE_EXCEEDED, f"the holder did not {waited_for} within {self._times.answer_s} s")

    # --- inside

    def _next_copy(self) -> list[ConsumerAction]:
        """Starts the next copy, of as much as is announced, unless one is in flight."""
        if self._in_flight or not self._waiting or self._pool is None:
            return []
        count = min(len(self._waiting), self._max_blocks_per_copy)
        self._in_flight = [self._waiting.popleft() for _ in range(count)]
        # Null blocks stand for positions out of a sliding window: a count, without bytes.
        real = [b for b in self._in_flight if NULL_BLOCK_ID not in (b.source_id, b.target_id)]
        fence = self._in_flight[-1].fence  # announced last: it stands for those before
        return [Copy(self._pool, tuple(b.source_id for b in real), tuple(b.target_id for b in real), fence)]

    def _tell_pulled(self, now: float) -> list[ConsumerAction]:
        pulled = min(self._num_copied)
        if pulled <= self._num_pulled:
            return []
        if self._answer_until is None:
            self._answer_until = now + self._times.answer_s
        self._num_pulled = pulled
        return [Send(Pulled(pulled))]

    def _commit_if_all_is_real(self) -> list[ConsumerAction]:
        if not self._all_confirmed or self._complete is None:
            return []
        assert not self._in_flight, self._in_flight
        self.state = ConsumerState.COMMITTED
        source = self.open.source
        stale = len(source.block_hashes) - self._num_blocks if isinstance(source, CachedSource) else 0
        return [Commit(HandoffResult(self._num_blocks, self._complete, self.stats, stale))]

    def _abort(self) -> list[ConsumerAction]:
        if self.is_over:
            return []
        # Also if the holder was lost before: an aborted request asks for no other.
        self._lost = None
        return self._stop(close=self.state in (ConsumerState.OPEN, ConsumerState.RECEIVING))

    def _lose(self, code: Code, message: str, *, close: bool = True) -> list[ConsumerAction]:
        if self.is_over or self.state is ConsumerState.ABORTING:
            return []
        self._lost = (code, message)
        return self._stop(close=close)

    def _stop(self, *, close: bool) -> list[ConsumerAction]:
        self._waiting.clear()
        self.state = ConsumerState.ABORTING
        # The holder may let go at once: what a running copy reads from now on is thrown away.
        actions: list[ConsumerAction] = [CloseStream(Code.CANCELLED)] if close else []
        return actions if self._in_flight else actions + self._report_end()

    def _report_end(self) -> list[ConsumerAction]:
        self.state = ConsumerState.ENDED
        if self._lost is None:
            return [End()]
        code, message = self._lost
        return [LoseHolder(HolderLost(code, message, self._num_confirmed, self.first_tokens_delivered, self.stats))]


def _num_blocks_wanted(open: Open, block_size: int) -> int:
    match open.source:
        case PrefillSource(token_ids=token_ids):
            return -(-len(token_ids) // block_size)
        case CachedSource(block_hashes=block_hashes):
            return len(block_hashes)


def _check_prompt_logprobs(source: PrefillSource, message: Complete) -> None:
    num_asked = 0 if source.params.prompt_logprobs is None else source.num_prompt_tokens - 1
    num_sent = 0 if message.prompt_logprobs is None else len(message.prompt_logprobs.logprobs)
    if num_sent != num_asked:
        raise ProtocolViolation(f"the holder sent {num_sent} log-probabilities of the prompt, not {num_asked}")

"""The consumer's state machine: every event in every state, and what must hold along the way."""

import dataclasses

import pytest

from engine.executor import SampledToken
from handoffs import LAYOUT, TOKEN, an_open, cached, pool_handle, prefill
from kvtransfer.consumer import Consumer, ConsumerState
from kvtransfer.errors import Code, PoolUnreachable
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
from kvtransfer.messages import Accepted, Complete, Confirmed, HandoffTimes, Open, Pulled, Ready
from tandem.v1.sampling_pb2 import PromptLogprobs

TIMES = HandoffTimes(lease_s=30.0, answer_s=10.0, deadline_s=120.0)
POOL = pool_handle()
STATS = TransferStats(0.5, 128, 1)

ACCEPTED = Accepted(0, 3, 30.0, POOL)
ACCEPTED_4 = Accepted(0, 4, 30.0, POOL)
READY_2 = Ready(0, (5, 6), 8)
READY_LAST = Ready(2, (9,), 10)
READY_ALL = Ready(0, (5, 6, 9), 10)
COPIED = CopyEnded(STATS)
COMPLETE = Complete((TOKEN,), 10, 4)

# Target blocks: one more than the prompt needs, for growth.
TABLE = (20, 21, 22, 23)


def a_consumer(open: Open | None = None, table: tuple[int, ...] = TABLE, **options: bool | int) -> Consumer:
    return Consumer(open or an_open(), [table], LAYOUT, times=TIMES, **options)  # type: ignore[arg-type]


def started(open: Open | None = None, events: tuple[ConsumerEvent, ...] = (), **options: bool | int) -> Consumer:
    consumer = a_consumer(open, **options)
    consumer.start(0.0)
    for event in events:
        consumer.handle(event, 1.0)
    return consumer


# How each state is reached, from OPEN on.
PATHS: dict[str, tuple[ConsumerEvent, ...]] = {
    "open": (),
    "receiving": (ACCEPTED,),
    "receiving, copying": (ACCEPTED, READY_2),
    "receiving, copied": (ACCEPTED, READY_2, COPIED),
    "receiving, confirmed": (ACCEPTED, READY_2, COPIED, Confirmed(2)),
    "receiving, all copied": (ACCEPTED, READY_ALL, COPIED, COMPLETE),
    "committed": (ACCEPTED, READY_ALL, COPIED, COMPLETE, Confirmed(3)),
    "aborting": (ACCEPTED, READY_2, AbortRequested()),
    "aborting, lost": (ACCEPTED, READY_2, COPIED, Confirmed(2), READY_LAST, StreamEnded(Code.UNAVAILABLE, "reset")),
    "ended": (ACCEPTED, AbortRequested()),
}

EVENTS: dict[str, ConsumerEvent] = {
    "accepted": ACCEPTED,
    "ready 0": READY_2,
    "ready 2": READY_LAST,
    "complete": COMPLETE,
    "confirmed 2": Confirmed(2),
    "confirmed 3": Confirmed(3),
    "copied": COPIED,
    "copy failed": CopyEnded(STATS, PoolUnreachable("it is gone")),
    "stream ended": StreamEnded(Code.UNAVAILABLE, "reset"),
    "abort": AbortRequested(),
    "tick": Tick(),
}

CLOSE = CloseStream(Code.CANCELLED)
COPY_2 = Copy(POOL, (5, 6), (20, 21))
COPY_LAST = Copy(POOL, (9,), (22,))
FIRST = DeliverFirstTokens(COMPLETE)


def lost(code: Code, confirmed: int = 0, *, delivered: bool = False, stats: TransferStats | None = None) -> LoseHolder:
    return LoseHolder(HolderLost(code, "", confirmed, delivered, stats or TransferStats()))


BROKEN = Code.INTERNAL  # what a holder that breaks the protocol is given up with
ONCE, TWICE = STATS, STATS + STATS

# (state, event) -> (state after, actions). Not listed: nothing happens.
EXPECTED: dict[tuple[str, str], tuple[str, list[ConsumerAction]]] = {
    ("open", "accepted"): ("receiving", []),
    ("open", "ready 0"): ("ended", [CLOSE, lost(BROKEN)]),
    ("open", "ready 2"): ("ended", [CLOSE, lost(BROKEN)]),
    ("open", "complete"): ("ended", [CLOSE, lost(BROKEN)]),
    ("open", "confirmed 2"): ("ended", [CLOSE, lost(BROKEN)]),
    ("open", "confirmed 3"): ("ended", [CLOSE, lost(BROKEN)]),
    ("open", "stream ended"): ("ended", [lost(Code.UNAVAILABLE)]),
    ("open", "abort"): ("ended", [CLOSE, End()]),
    ("receiving", "ready 0"): ("receiving", [COPY_2]),
    ("receiving", "ready 2"): ("ended", [CLOSE, lost(BROKEN)]),  # a hole
    ("receiving", "complete"): ("ended", [CLOSE, lost(BROKEN)]),  # blocks are missing
    ("receiving", "confirmed 2"): ("ended", [CLOSE, lost(BROKEN)]),  # nothing was pulled
    ("receiving", "confirmed 3"): ("ended", [CLOSE, lost(BROKEN)]),
    ("receiving", "stream ended"): ("ended", [lost(Code.UNAVAILABLE)]),
    ("receiving", "abort"): ("ended", [CLOSE, End()]),
    # With a copy in flight nothing ends, whatever is said.
    ("receiving, copying", "ready 0"): ("aborting", [CLOSE]),
    ("receiving, copying", "ready 2"): ("receiving", []),  # it waits for the copy
    ("receiving, copying", "complete"): ("aborting", [CLOSE]),
    ("receiving, copying", "confirmed 2"): ("aborting", [CLOSE]),
    ("receiving, copying", "confirmed 3"): ("aborting", [CLOSE]),
    ("receiving, copying", "copied"): ("receiving", [Send(Pulled(2))]),
    ("receiving, copying", "copy failed"): ("ended", [CLOSE, lost(Code.UNAVAILABLE, stats=ONCE)]),
    ("receiving, copying", "stream ended"): ("aborting", []),
    ("receiving, copying", "abort"): ("aborting", [CLOSE]),
    ("receiving, copied", "ready 0"): ("ended", [CLOSE, lost(BROKEN, stats=ONCE)]),
    ("receiving, copied", "ready 2"): ("receiving", [COPY_LAST]),
    ("receiving, copied", "complete"): ("ended", [CLOSE, lost(BROKEN, stats=ONCE)]),
    ("receiving, copied", "confirmed 2"): ("receiving", [CommitBlocks(2)]),
    ("receiving, copied", "confirmed 3"): ("ended", [CLOSE, lost(BROKEN, stats=ONCE)]),
    ("receiving, copied", "stream ended"): ("ended", [lost(Code.UNAVAILABLE, stats=ONCE)]),
    ("receiving, copied", "abort"): ("ended", [CLOSE, End()]),
    ("receiving, confirmed", "ready 0"): ("ended", [CLOSE, lost(BROKEN, 2, stats=ONCE)]),
    ("receiving, confirmed", "ready 2"): ("receiving", [COPY_LAST]),
    ("receiving, confirmed", "complete"): ("ended", [CLOSE, lost(BROKEN, 2, stats=ONCE)]),
    ("receiving, confirmed", "confirmed 3"): ("ended", [CLOSE, lost(BROKEN, 2, stats=ONCE)]),
    ("receiving, confirmed", "stream ended"): ("ended", [lost(Code.UNAVAILABLE, 2, stats=ONCE)]),
    ("receiving, confirmed", "abort"): ("ended", [CLOSE, End()]),
    ("receiving, all copied", "ready 0"): ("ended", [CLOSE, lost(BROKEN, delivered=True, stats=ONCE)]),
    ("receiving, all copied", "ready 2"): ("ended", [CLOSE, lost(BROKEN, delivered=True, stats=ONCE)]),
    ("receiving, all copied", "confirmed 2"): ("receiving", [CommitBlocks(2)]),
    ("receiving, all copied", "confirmed 3"): (
        "committed",
        [CommitBlocks(3), Commit(HandoffResult(3, COMPLETE, STATS))],
    ),
    ("receiving, all copied", "stream ended"): ("ended", [lost(Code.UNAVAILABLE, delivered=True, stats=ONCE)]),
    ("receiving, all copied", "abort"): ("ended", [CLOSE, End()]),
    ("aborting", "copied"): ("ended", [End()]),
    ("aborting", "copy failed"): ("ended", [End()]),
    ("aborting, lost", "copied"): ("ended", [lost(Code.UNAVAILABLE, 2, stats=TWICE)]),
    ("aborting, lost", "copy failed"): ("ended", [lost(Code.UNAVAILABLE, 2, stats=TWICE)]),
}


def without_words(actions: list[ConsumerAction]) -> list[ConsumerAction]:
    return [LoseHolder(dataclasses.replace(a.lost, message="")) if isinstance(a, LoseHolder) else a for a in actions]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", PATHS)
def test_every_event_in_every_state_does_what_the_table_says(state: str, event: str) -> None:
    consumer = started(events=PATHS[state])
    assert consumer.state.value == state.partition(",")[0]

    state_after, actions = EXPECTED.get((state, event), (consumer.state.value, []))
    assert without_words(consumer.handle(EVENTS[event], 1.0)) == actions
    assert consumer.state.value == state_after


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", PATHS)
def test_an_end_is_reported_once_and_only_when_no_copy_is_in_flight(state: str, event: str) -> None:
    consumer = a_consumer()
    actions = consumer.start(0.0)
    for happened in (*PATHS[state], EVENTS[event], AbortRequested(), AbortRequested()):
        actions += consumer.handle(happened, 1.0)
        if consumer.is_over:
            assert not consumer.is_copying
    for happened in (COPIED, COPIED, StreamEnded(Code.OK), Tick(), ACCEPTED, READY_2, COMPLETE, Confirmed(3)):
        actions += consumer.handle(happened, 200.0)
    assert consumer.is_over
    assert consumer.next_deadline is None
    assert sum(isinstance(action, Commit | LoseHolder | End) for action in actions) == 1


@pytest.mark.parametrize("event", EVENTS)
def test_a_hand_off_that_is_not_opened_yet_can_be_aborted_or_lost_and_hears_nothing_else(event: str) -> None:
    consumer = a_consumer()
    actions = without_words(consumer.handle(EVENTS[event], 0.0))
    if event == "abort":
        assert actions == [End()]
        assert consumer.start(0.0) == [], "what was aborted is not opened any more"
    elif event == "stream ended":
        assert actions == [lost(Code.UNAVAILABLE)]
    else:
        assert actions == []
        assert consumer.state is ConsumerState.RESERVED


def test_an_abort_while_the_last_copy_of_a_lost_holder_runs_asks_for_no_other_holder() -> None:
    consumer = started(events=(*PATHS["aborting, lost"], AbortRequested()))
    assert consumer.handle(COPIED, 1.0) == [End()]


def test_an_aborting_hand_off_starts_no_new_copy() -> None:
    consumer = started(events=(ACCEPTED, READY_2, READY_LAST, AbortRequested()))
    assert consumer.handle(COPIED, 1.0) == [End()]


def test_the_copy_after_one_in_flight_takes_all_that_was_announced_meanwhile() -> None:
    consumer = started(an_open(prefill(16)), (Accepted(0, 4, 30.0, POOL), Ready(0, (5,), 4)))
    assert consumer.handle(Ready(1, (6,), 8), 1.0) == []
    assert consumer.handle(Ready(2, (7, 11), 16), 1.0) == []
    assert consumer.handle(COPIED, 1.0) == [Send(Pulled(1)), Copy(POOL, (6, 7, 11), (21, 22, 23))]


def test_a_copy_waits_for_the_last_fence_among_its_blocks_and_for_no_later_one() -> None:
    consumer = started(an_open(prefill(16)), (ACCEPTED_4,), max_bytes_per_copy=2 * LAYOUT.bytes_per_block)
    assert consumer.handle(Ready(0, (5,), 4, fence=7), 1.0) == [Copy(POOL, (5,), (20,), 7)]
    for ready in (Ready(1, (6,), 8, fence=0), Ready(2, (7,), 12, fence=1), Ready(3, (11,), 16)):
        assert consumer.handle(ready, 1.0) == []
    assert consumer.handle(COPIED, 1.0) == [Send(Pulled(1)), Copy(POOL, (6, 7), (21, 22), 1)]
    assert consumer.handle(COPIED, 1.0) == [Send(Pulled(3)), Copy(POOL, (11,), (23,), None)]


def test_a_copy_is_not_longer_than_an_abort_may_wait() -> None:
    consumer = started(events=(ACCEPTED,), max_bytes_per_copy=2 * LAYOUT.bytes_per_block)
    assert consumer.handle(READY_ALL, 1.0) == [COPY_2]
    assert consumer.handle(COPIED, 1.0) == [Send(Pulled(2)), COPY_LAST]


def test_a_block_larger_than_a_copy_may_be_is_copied_alone() -> None:
    consumer = started(events=(ACCEPTED,), max_bytes_per_copy=1)
    assert consumer.handle(READY_ALL, 1.0) == [Copy(POOL, (5,), (20,))]


def test_the_first_token_is_delivered_before_any_block_is_confirmed() -> None:
    consumer = started(events=(ACCEPTED, READY_ALL))
    assert consumer.handle(COMPLETE, 1.0) == [FIRST]
    assert consumer.handle(COMPLETE, 1.0) == []


def test_the_first_token_is_not_delivered_again_by_the_hand_off_after_a_lost_one() -> None:
    consumer = started(an_open(prefill(10, skip_blocks=2)), (ACCEPTED, READY_LAST), first_tokens_delivered=True)
    assert consumer.handle(COMPLETE, 1.0) == []
    assert consumer.handle(COPIED, 1.0) == [Send(Pulled(3))]
    actions = consumer.handle(Confirmed(3), 1.0)
    assert actions == [CommitBlocks(3), Commit(HandoffResult(3, COMPLETE, STATS))]


def test_the_first_tokens_of_all_choices_come_with_the_prompts_log_probabilities() -> None:
    complete = Complete(
        (TOKEN, SampledToken(1), SampledToken(2)), 10, prompt_logprobs=PromptLogprobs(logprobs=[-1] * 9)
    )
    consumer = started(an_open(prefill(10, num_choices=3, prompt_logprobs=0)), (ACCEPTED, READY_ALL))
    assert consumer.handle(complete, 1.0) == [DeliverFirstTokens(complete)]


@pytest.mark.parametrize(
    "complete",
    [
        Complete((TOKEN,) * 3, 10),
        Complete((TOKEN,) * 3, 10, prompt_logprobs=PromptLogprobs(logprobs=[-1] * 10)),
        Complete((TOKEN,) * 2, 10, prompt_logprobs=PromptLogprobs(logprobs=[-1] * 9)),
    ],
    ids=["no log-probabilities", "of another number of tokens", "a first token missing"],
)
def test_a_completion_that_lacks_what_was_asked_for_breaks_the_protocol(complete: Complete) -> None:
    consumer = started(an_open(prefill(10, num_choices=3, prompt_logprobs=0)), (ACCEPTED, READY_ALL, COPIED))
    actions = consumer.handle(complete, 1.0)
    assert without_words(actions) == [CLOSE, lost(BROKEN, stats=STATS)]


@pytest.mark.parametrize("skip_blocks", [1, 2, 3])
def test_blocks_that_were_there_before_count_as_confirmed_when_the_holder_is_lost(skip_blocks: int) -> None:
    consumer = started(an_open(prefill(10, skip_blocks)))
    actions = consumer.handle(StreamEnded(Code.UNAVAILABLE), 1.0)
    assert without_words(actions) == [lost(Code.UNAVAILABLE, skip_blocks)]


def test_a_hand_off_of_no_blocks_is_committed_with_completion_and_confirmation() -> None:
    consumer = started(an_open(prefill(10, skip_blocks=3)), (ACCEPTED,))
    assert consumer.handle(COMPLETE, 1.0) == [FIRST]
    assert consumer.handle(Confirmed(3), 1.0) == [Commit(HandoffResult(3, COMPLETE, TransferStats()))]


@pytest.mark.parametrize(("held", "skip"), [(0, 0), (1, 0), (1, 2), (2, 1), (3, 0)])
def test_a_cached_prefix_shorter_than_hoped_is_committed_and_counted_as_stale(held: int, skip: int) -> None:
    consumer = started(an_open(cached(3, skip)), (Accepted(4 * held, held, 30.0, POOL),))
    if held > skip:
        consumer.handle(Ready(skip, (5, 6, 9)[skip:held], 4 * held), 1.0)
        consumer.handle(COPIED, 1.0)
    complete = Complete((), 4 * held, 4 * held)
    assert consumer.handle(complete, 1.0) == [], "a cached prefix has no first token"
    *_, commit = consumer.handle(Confirmed(held), 1.0)
    stats = STATS if held > skip else TransferStats()
    assert commit == Commit(HandoffResult(held, complete, stats, num_stale_blocks=3 - held))
    assert consumer.num_confirmed_blocks == max(held, skip)


VIOLATIONS: dict[str, tuple[ConsumerEvent, ...]] = {
    "another layout": (dataclasses.replace(ACCEPTED, pool=dataclasses.replace(POOL, bytes_per_block=32)),),
    "another fingerprint": (dataclasses.replace(ACCEPTED, pool=dataclasses.replace(POOL, fingerprint=b"x" * 16)),),
    "too many blocks": (dataclasses.replace(ACCEPTED, num_blocks=4),),
    "too few blocks": (dataclasses.replace(ACCEPTED, num_blocks=2),),
    "an unknown group": (ACCEPTED, dataclasses.replace(READY_2, group=1)),
    "a block past the pool": (ACCEPTED, Ready(0, (POOL.num_blocks,), 4)),
    "a block too many": (ACCEPTED, Ready(0, (5, 6, 7, 8), 16)),
    "a block twice": (ACCEPTED, READY_2, Ready(1, (6, 9), 10)),
    "no first token": (ACCEPTED, READY_ALL, COPIED, Complete((), 10)),
    "more first tokens than choices": (ACCEPTED, READY_ALL, COPIED, Complete((TOKEN, TOKEN), 10)),
    "log-probabilities nobody asked for": (
        ACCEPTED,
        READY_ALL,
        COPIED,
        Complete((TOKEN,), 10, prompt_logprobs=PromptLogprobs(logprobs=[-1.0] * 9)),
    ),
    "another number of tokens": (ACCEPTED, READY_ALL, COPIED, Complete((TOKEN,), 9)),
    "a confirmation of what was not pulled": (ACCEPTED, READY_ALL, Confirmed(3)),
}


@pytest.mark.parametrize("what", VIOLATIONS)
def test_a_holder_that_says_what_cannot_be_is_given_up(what: str) -> None:
    consumer = started(events=VIOLATIONS[what])
    assert consumer.state in (ConsumerState.ENDED, ConsumerState.ABORTING)
    actions = consumer.handle(COPIED, 1.0)
    assert actions == [] or isinstance(actions[0], LoseHolder)
    assert consumer.num_confirmed_blocks == 0


def test_a_stream_that_ends_well_before_its_end_is_a_lost_holder() -> None:
    consumer = started(events=PATHS["receiving, confirmed"])
    (action,) = consumer.handle(StreamEnded(Code.OK), 1.0)
    assert isinstance(action, LoseHolder)
    assert action.lost.code is Code.UNAVAILABLE
    assert action.lost.num_confirmed_blocks == 2


def test_a_holder_that_does_not_answer_the_open_is_given_up() -> None:
    consumer = started()
    assert consumer.next_deadline == 10.0
    assert consumer.handle(Tick(), 9.9) == []
    assert without_words(consumer.handle(Tick(), 10.0)) == [CLOSE, lost(Code.DEADLINE_EXCEEDED)]


def test_a_holder_may_compute_for_longer_than_it_may_take_to_answer() -> None:
    consumer = started(events=(ACCEPTED,))
    assert consumer.next_deadline == 100.0


def test_a_holder_that_does_not_confirm_is_given_up_before_its_own_lease_ends() -> None:
    consumer = started(events=PATHS["receiving, copied"])
    assert consumer.next_deadline == 11.0 < 1.0 + TIMES.lease_s
    assert without_words(consumer.handle(Tick(), 11.0)) == [CLOSE, lost(Code.DEADLINE_EXCEEDED, stats=ONCE)]


def test_each_confirmation_gives_the_holder_time_for_the_next() -> None:
    consumer = started(events=PATHS["receiving, copied"])
    consumer.handle(READY_LAST, 2.0)
    consumer.handle(COPIED, 3.0)
    assert consumer.next_deadline == 11.0, "the oldest copy still waits"
    consumer.handle(Confirmed(2), 4.0)
    assert consumer.next_deadline == 14.0
    consumer.handle(Confirmed(3), 5.0)
    assert consumer.next_deadline == 100.0


def test_the_deadline_of_the_hand_off_waits_for_a_copy_in_flight() -> None:
    consumer = started(events=PATHS["receiving, copying"])
    assert consumer.handle(Tick(), 100.0) == [CLOSE]
    assert consumer.next_deadline is None, "a copy ends when it ends"
    assert without_words(consumer.handle(COPIED, 150.0)) == [lost(Code.DEADLINE_EXCEEDED, stats=ONCE)]


def test_blocks_out_of_a_sliding_window_are_counted_but_not_copied() -> None:
    consumer = Consumer(an_open(), [(20, 21, 22), (0, 31, 32)], LAYOUT, times=TIMES)
    consumer.start(0.0)
    consumer.handle(ACCEPTED, 0.0)
    assert consumer.handle(READY_ALL, 0.0) == [Copy(POOL, (5, 6, 9), (20, 21, 22))]
    assert consumer.handle(Ready(0, (0, 7), 8, group=1), 0.0) == []
    assert consumer.handle(COPIED, 0.0) == [Copy(POOL, (7,), (31,))], "of group 1 nothing has been pulled yet"
    assert consumer.handle(COPIED, 0.0) == [Send(Pulled(2))]
    assert consumer.handle(Ready(2, (8,), 10, group=1), 0.0) == [Copy(POOL, (8,), (32,))]
    assert consumer.handle(COPIED, 0.0) == [Send(Pulled(3))]


@pytest.mark.parametrize(
    ("tables", "source"),
    [([(20, 21)], prefill(10)), ([], prefill(10)), ([(20, 21, 22), (30,)], prefill(10)), ([(20,)], cached(2))],
)
def test_tables_that_cannot_hold_the_hand_off_are_the_callers_fault(
    tables: list[tuple[int, ...]], source: object
) -> None:
    with pytest.raises(ValueError, match="table"):
        Consumer(an_open(source), tables, LAYOUT)  # type: ignore[arg-type]


def test_more_blocks_skipped_than_there_are_is_the_callers_fault() -> None:
    with pytest.raises(ValueError, match="skip_blocks is 4, of 3 blocks"):
        a_consumer(an_open(prefill(10, skip_blocks=4)))


def test_times_that_let_the_holder_wait_shorter_than_the_consumer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"answer_s \(40.0\) must not be above lease_s \(30.0\)"):
        HandoffTimes(lease_s=30.0, answer_s=40.0)
    with pytest.raises(ValueError, match="lease_s must be above 0, not 0"):
        HandoffTimes(lease_s=0.0)

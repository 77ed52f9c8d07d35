"""The holder's state machine: every event in every state, and what must hold along the way."""

import dataclasses

import pytest

from handoffs import FINGERPRINT, TOKEN, an_open, cached, pool_handle, prefill
from kvtransfer.errors import Code
from kvtransfer.events import (
    AbortCompute,
    CachedPinned,
    CloseStream,
    Computed,
    Failed,
    Filled,
    HolderAction,
    HolderEvent,
    PinCached,
    Send,
    Started,
    StartPrefill,
    StreamEnded,
    Tick,
    Unpin,
)
from kvtransfer.holder import Holder, HolderEnd, HolderState
from kvtransfer.messages import Accepted, Complete, Confirmed, HandoffTimes, Open, Pulled, Ready, Source

TIMES = HandoffTimes(lease_s=30.0, answer_s=10.0, deadline_s=120.0)


def a_holder(open: Open | None = None, num_groups: int = 1) -> Holder:
    return Holder(
        open or an_open(),
        pool_handle(),
        block_size=4,
        fingerprint=FINGERPRINT,
        num_groups=num_groups,
        times=TIMES,
    )


def started(open: Open | None = None, events: tuple[HolderEvent, ...] = (), num_groups: int = 1) -> Holder:
    holder = a_holder(open, num_groups)
    holder.start(0.0)
    for event in events:
        holder.handle(event, 1.0)
    return holder


# Ten tokens in blocks of four: three blocks.
FILLED_ALL = Filled(0, (5, 6, 9), 10)
COMPUTED = Computed((TOKEN,), 10)

# How each state is reached.
PATHS: dict[str, tuple[Open, tuple[HolderEvent, ...]]] = {
    "queued": (an_open(), ()),
    "queued, cached": (an_open(cached()), ()),
    "computing": (an_open(), (Started(), Filled(0, (5, 6), 8))),
    "holding": (an_open(), (FILLED_ALL, COMPUTED, Pulled(1))),
    "holding, cached": (an_open(cached()), (CachedPinned(((5, 6, 9),)), Pulled(1))),
    "done": (an_open(), (FILLED_ALL, COMPUTED, Pulled(3))),
    "ended": (an_open(), (Filled(0, (5, 6), 8), StreamEnded(Code.CANCELLED))),
}

EVENTS: dict[str, HolderEvent] = {
    "started": Started(),
    "filled": Filled(2, (9,), 10),
    "filled again": Filled(0, (5, 6), 8),
    "pinned": CachedPinned(((15, 16),)),
    "computed": COMPUTED,
    "pulled 0": Pulled(0),
    "pulled 2": Pulled(2),
    "pulled 3": Pulled(3),
    "failed": Failed(Code.INTERNAL, "the engine died"),
    "stream ended": StreamEnded(Code.UNAVAILABLE, "reset"),
    "tick": Tick(),
}

ABORT = AbortCompute()


def close(code: Code) -> CloseStream:
    return CloseStream(code)


# (state, event) -> (state after, actions). Not listed: nothing happens.
EXPECTED: dict[tuple[str, str], tuple[str, list[HolderAction]]] = {
    ("queued", "started"): ("computing", []),
    ("queued", "filled"): ("ended", [Unpin((9,)), ABORT, close(Code.INTERNAL)]),  # a hole
    ("queued", "filled again"): ("computing", [Send(Ready(0, (5, 6), 8))]),
    ("queued", "pinned"): ("queued", [Unpin((15, 16))]),
    ("queued", "computed"): ("ended", [ABORT, close(Code.INTERNAL)]),
    ("queued", "pulled 2"): ("ended", [ABORT, close(Code.INVALID_ARGUMENT)]),
    ("queued", "pulled 3"): ("ended", [ABORT, close(Code.INVALID_ARGUMENT)]),
    ("queued", "failed"): ("ended", [ABORT, close(Code.INTERNAL)]),
    ("queued", "stream ended"): ("ended", [ABORT]),
    ("queued, cached", "filled"): ("queued", [Unpin((9,))]),
    ("queued, cached", "filled again"): ("queued", [Unpin((5, 6))]),
    ("queued, cached", "pinned"): (
        "holding",
        [Send(Accepted(8, 2, 30.0, pool_handle())), Send(Ready(0, (15, 16), 8)), Send(Complete((), 8, 8))],
    ),
    ("queued, cached", "pulled 2"): ("ended", [ABORT, close(Code.INVALID_ARGUMENT)]),
    ("queued, cached", "pulled 3"): ("ended", [ABORT, close(Code.INVALID_ARGUMENT)]),
    ("queued, cached", "failed"): ("ended", [ABORT, close(Code.INTERNAL)]),
    ("queued, cached", "stream ended"): ("ended", [ABORT]),
    ("computing", "filled"): ("computing", [Send(Ready(2, (9,), 10))]),
    ("computing", "filled again"): ("computing", [Unpin((5, 6))]),
    ("computing", "pinned"): ("computing", [Unpin((15, 16))]),
    ("computing", "computed"): ("ended", [ABORT, Unpin((5, 6)), close(Code.INTERNAL)]),
    ("computing", "pulled 2"): ("computing", [Send(Confirmed(2)), Unpin((5, 6))]),
    ("computing", "pulled 3"): ("ended", [ABORT, Unpin((5, 6)), close(Code.INVALID_ARGUMENT)]),
    ("computing", "failed"): ("ended", [ABORT, Unpin((5, 6)), close(Code.INTERNAL)]),
    ("computing", "stream ended"): ("ended", [ABORT, Unpin((5, 6))]),
    ("holding", "filled"): ("holding", [Unpin((9,))]),
    ("holding", "filled again"): ("holding", [Unpin((5, 6))]),
    ("holding", "pinned"): ("holding", [Unpin((15, 16))]),
    ("holding", "pulled 2"): ("holding", [Send(Confirmed(2)), Unpin((6,))]),
    ("holding", "pulled 3"): ("done", [Send(Confirmed(3)), Unpin((6, 9)), close(Code.OK)]),
    ("holding", "failed"): ("ended", [Unpin((6, 9)), close(Code.INTERNAL)]),
    ("holding", "stream ended"): ("ended", [Unpin((6, 9))]),
    ("done", "filled"): ("done", [Unpin((9,))]),
    ("done", "filled again"): ("done", [Unpin((5, 6))]),
    ("done", "pinned"): ("done", [Unpin((15, 16))]),
    ("ended", "filled"): ("ended", [Unpin((9,))]),
    ("ended", "filled again"): ("ended", [Unpin((5, 6))]),
    ("ended", "pinned"): ("ended", [Unpin((15, 16))]),
}
EXPECTED |= {
    ("holding, cached", event): EXPECTED["holding", event] for event in EVENTS if ("holding", event) in EXPECTED
}


def without_words(actions: list[HolderAction]) -> list[HolderAction]:
    return [CloseStream(a.code) if isinstance(a, CloseStream) else a for a in actions]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", PATHS)
def test_every_event_in_every_state_does_what_the_table_says(state: str, event: str) -> None:
    holder = started(*PATHS[state])
    assert holder.state.value == state.partition(",")[0]

    state_after, actions = EXPECTED.get((state, event), (holder.state.value, []))
    assert without_words(holder.handle(EVENTS[event], 1.0)) == actions
    assert holder.state.value == state_after


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", PATHS)
def test_an_event_that_comes_twice_does_nothing_more_than_give_its_own_pins_back(state: str, event: str) -> None:
    holder = started(*PATHS[state])
    holder.handle(EVENTS[event], 1.0)
    state_after = holder.state
    again = holder.handle(EVENTS[event], 1.0)
    if (state, event) == ("queued", "filled again"):
        assert again == [Unpin((5, 6))]
    assert all(isinstance(action, Unpin) for action in again)
    assert holder.state is state_after


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", PATHS)
def test_pins_are_all_given_back_when_the_stream_ends_after_any_event(state: str, event: str) -> None:
    open, path = PATHS[state]
    holder = a_holder(open)
    given, taken = [], []
    actions = holder.start(0.0)
    for happened in (*path, EVENTS[event], StreamEnded(Code.CANCELLED)):
        if isinstance(happened, Filled):
            given += happened.block_ids
        if isinstance(happened, CachedPinned):
            given += [b for table in happened.block_tables for b in table]
        actions += holder.handle(happened, 1.0)
    taken = [b for action in actions if isinstance(action, Unpin) for b in action.block_ids]
    assert sorted(taken) == sorted(given)
    assert holder.pinned == []
    assert holder.is_over
    assert holder.next_deadline is None


@pytest.mark.parametrize("state", PATHS)
def test_a_deadline_ends_every_state_that_still_waits(state: str) -> None:
    holder = started(*PATHS[state])
    was_over = holder.is_over
    actions = without_words(holder.handle(Tick(), 100.0))
    assert holder.is_over
    assert (close(Code.DEADLINE_EXCEEDED) in actions) is not was_over
    if not was_over:
        assert holder.end is HolderEnd.DEADLINE


def test_a_prefill_is_started_and_accepted_at_once() -> None:
    assert a_holder().start(0.0) == [StartPrefill(), Send(Accepted(0, 3, 30.0, pool_handle()))]


def test_a_cached_prefix_is_accepted_when_it_is_known_how_much_is_held() -> None:
    assert a_holder(an_open(cached())).start(0.0) == [PinCached()]


def test_an_open_with_another_fingerprint_is_refused_and_nothing_reserved() -> None:
    holder = a_holder(an_open(fingerprint=b"x" * 16))
    actions = holder.start(0.0)
    assert without_words(actions) == [close(Code.FAILED_PRECONDITION)]
    assert holder.end is HolderEnd.FINGERPRINT


@pytest.mark.parametrize(
    "source",
    [
        prefill(10, skip_blocks=4),
        dataclasses.replace(prefill(10), num_prompt_tokens=0),
        dataclasses.replace(prefill(10), num_prompt_tokens=11),
    ],
)
def test_an_open_that_makes_no_sense_is_refused_and_nothing_reserved(source: Source) -> None:
    holder = a_holder(an_open(source))
    assert without_words(holder.start(0.0)) == [close(Code.INVALID_ARGUMENT)]


def test_a_refusal_by_the_engine_closes_the_stream_with_its_code() -> None:
    holder = started()
    actions = holder.handle(Failed(Code.RESOURCE_EXHAUSTED, "the queue is full", refused=True), 0.0)
    assert actions == [CloseStream(Code.RESOURCE_EXHAUSTED, "the queue is full")]
    assert holder.end is HolderEnd.REFUSED


def test_the_lease_runs_only_while_the_consumer_has_something_to_copy() -> None:
    holder = started()
    assert holder.next_deadline == 100.0
    holder.handle(Filled(0, (5,), 4), 10.0)
    assert holder.next_deadline == 40.0
    holder.handle(Filled(1, (6,), 8), 20.0)
    assert holder.next_deadline == 40.0, "announcing more is no progress of the consumer"
    holder.handle(Pulled(1), 30.0)
    assert holder.next_deadline == 60.0
    holder.handle(Pulled(2), 35.0)
    assert holder.next_deadline == 100.0
    assert holder.handle(Tick(), 99.0) == []


def test_an_expired_lease_drops_the_pins_and_says_aborted() -> None:
    holder = started(*PATHS["holding"])
    actions = holder.handle(Tick(), 31.0)
    assert without_words(actions) == [Unpin((6, 9)), close(Code.ABORTED)]
    assert holder.end is HolderEnd.LEASE
    assert holder.handle(Pulled(3), 31.5) == [], "a copy that ended after the lease is never confirmed"


def test_blocks_that_the_consumer_has_are_not_sent_and_their_pins_given_back() -> None:
    holder = started(an_open(prefill(10, skip_blocks=2)))
    assert holder.handle(Filled(0, (5,), 4), 1.0) == [Unpin((5,))]
    assert holder.handle(Filled(1, (6, 9), 10), 1.0) == [Unpin((6,)), Send(Ready(2, (9,), 10))]
    assert holder.handle(COMPUTED, 1.0) == [Send(Complete((TOKEN,), 10))]
    assert without_words(holder.handle(Pulled(3), 1.0)) == [Send(Confirmed(3)), Unpin((9,)), close(Code.OK)]


def test_a_hand_off_with_nothing_to_send_is_completed_and_confirmed_all_the_same() -> None:
    holder = started(an_open(prefill(10, skip_blocks=3)))
    assert holder.handle(FILLED_ALL, 1.0) == [Unpin((5, 6, 9))]
    assert without_words(holder.handle(COMPUTED, 1.0)) == [
        Send(Complete((TOKEN,), 10)),
        Send(Confirmed(3)),
        close(Code.OK),
    ]
    assert holder.state is HolderState.DONE


@pytest.mark.parametrize("skip_blocks", [0, 2])
def test_a_cached_prefix_that_is_gone_is_completed_and_confirmed_with_nothing(skip_blocks: int) -> None:
    holder = started(an_open(cached(3, skip_blocks)))
    actions = holder.handle(CachedPinned(((),)), 1.0)
    assert without_words(actions) == [
        Send(Accepted(0, 0, 30.0, pool_handle())),
        Send(Complete((), 0)),
        Send(Confirmed(0)),
        close(Code.OK),
    ]
    assert holder.num_stale_blocks == 3


def test_a_cached_prefix_is_sent_without_the_blocks_that_the_consumer_has() -> None:
    holder = started(an_open(cached(3, skip_blocks=1)))
    actions = holder.handle(CachedPinned(((5, 6, 9),)), 1.0)
    assert actions == [
        Unpin((5,)),
        Send(Accepted(12, 3, 30.0, pool_handle())),
        Send(Ready(1, (6, 9), 12)),
        Send(Complete((), 12, 12)),
    ]
    assert holder.num_stale_blocks == 0


def test_a_consumer_that_has_pulled_all_before_the_first_token_is_done_with_it() -> None:
    holder = started(events=(FILLED_ALL, Pulled(3)))
    assert holder.state is HolderState.COMPUTING
    assert without_words(holder.handle(COMPUTED, 1.0)) == [Send(Complete((TOKEN,), 10)), close(Code.OK)]


def test_blocks_count_as_pulled_when_those_of_every_group_are() -> None:
    holder = started(num_groups=2)
    holder.handle(Filled(0, (5, 6, 9), 10, group=0), 1.0)
    holder.handle(Filled(0, (0, 7), 8, group=1), 1.0)  # the window has passed block 0
    assert without_words(holder.handle(Pulled(2), 1.0)) == [Send(Confirmed(2)), Unpin((5, 6, 7))]
    holder.handle(Filled(2, (8,), 10, group=1), 1.0)
    holder.handle(COMPUTED, 1.0)
    assert without_words(holder.handle(Pulled(3), 1.0)) == [Send(Confirmed(3)), Unpin((9, 8)), close(Code.OK)]


def test_blocks_of_a_group_that_does_not_exist_end_the_hand_off() -> None:
    holder = started()
    actions = holder.handle(Filled(0, (5,), 4, group=1), 1.0)
    assert without_words(actions) == [Unpin((5,)), ABORT, close(Code.INTERNAL)]


def test_a_cached_prefix_of_several_groups_is_as_long_as_the_shortest() -> None:
    holder = started(an_open(cached(3)), num_groups=2)
    actions = holder.handle(CachedPinned(((5, 6, 9), (7, 8))), 1.0)
    assert actions == [
        Unpin((9,)),
        Send(Accepted(8, 2, 30.0, pool_handle())),
        Send(Ready(0, (5, 6), 8, 0)),
        Send(Ready(0, (7, 8), 8, 1)),
        Send(Complete((), 8, 8)),
    ]


def test_a_hand_off_without_a_timeout_has_the_default_deadline() -> None:
    holder = started(an_open(timeout_s=0.0))
    assert holder.next_deadline == 120.0


def test_what_a_reader_must_wait_for_is_announced_with_the_blocks() -> None:
    holder = started()
    assert holder.handle(Filled(0, (5,), 4, fence=3), 1.0) == [Send(Ready(0, (5,), 4, fence=3))]
    holder = started(an_open(cached(3)))
    actions = holder.handle(CachedPinned(((5, 6, 9),), fence=2), 1.0)
    assert Send(Ready(0, (5, 6, 9), 12, fence=2)) in actions

"""Both machines against each other, in virtual time, over a network and an engine that do their worst.

Whatever happens: no block stays pinned, no copy is written into a block of somebody else, what is committed is right,
the client gets the first tokens, one a choice, once, and all of it is over within the lease.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handoff_world import MAX_REPAIRS, NUM_BLOCKS, TIMES, World

# name -> what happens; the number is its only parameter.
HAPPENINGS = {
    "goes on": lambda world, n: world.go_on(n),
    "deliver to holder": lambda world, n: world.deliver_to_holder(),
    "deliver to consumer": lambda world, n: world.deliver_to_consumer(),
    "engine steps": lambda world, n: world.engine_step(1 + n % 3),
    "engine reports": lambda world, n: world.engine_report(),
    "copy reads": lambda world, n: world.copy_reads(),
    "copy ends": lambda world, n: world.copy_ends(),
    "time passes": lambda world, n: world.advance((0.5, 4.0, 11.0, 31.0)[n % 4]),
    "preempted": lambda world, n: world.preempt(),
    "engine fails": lambda world, n: world.engine_fails(),
    "abort": lambda world, n: world.abort(),
    "cut": lambda world, n: world.cut(),
    "holder hears of the cut": lambda world, n: world.notify_holder(),
    "consumer hears of the cut": lambda world, n: world.notify_consumer(),
    "holder dies": lambda world, n: world.kill_holder(),
    "old events again": lambda world, n: world.repeat_old_events(),
}
FAULTS = ("preempted", "engine fails", "abort", "cut", "holder dies")
GOOD = tuple(name for name in HAPPENINGS if name not in FAULTS)

# Mostly what should happen, so that faults find a hand-off at work.
happenings = st.lists(
    st.tuples(st.one_of(*[st.sampled_from(GOOD)] * 4, st.sampled_from(FAULTS)), st.integers(0, 11)),
    min_size=5,
    max_size=60,
)
worlds = st.builds(
    World,
    source=st.sampled_from(["prefill", "cached"]),
    num_cached=st.integers(0, NUM_BLOCKS),
    skip_blocks=st.integers(0, NUM_BLOCKS),
    num_choices=st.integers(1, 4),
    prompt_logprobs=st.none() | st.integers(0, 3),
)

# Each attempt may wait for the other side's silence; the holder's lease is the longest such wait.
LONGEST_S = TIMES.lease_s * (MAX_REPAIRS + 1)


@settings(max_examples=800, deadline=None)
@given(worlds, st.integers(0, 40), happenings)
def test_nothing_leaks_and_nothing_wrong_is_committed_whatever_happens(
    world: World, num_good_steps: int, happened: list[tuple[str, int]]
) -> None:
    world.go_on(num_good_steps)
    for name, n in happened:
        HAPPENINGS[name](world, n)
    assert world.settle() <= LONGEST_S
    world.check_whole()
    world.repeat_old_events()


@pytest.mark.parametrize("source", ["prefill", "cached"])
@pytest.mark.parametrize("skip_blocks", range(NUM_BLOCKS + 1))
@pytest.mark.parametrize("num_cached", range(NUM_BLOCKS + 1))
def test_a_hand_off_without_faults_is_committed_at_once(source: str, skip_blocks: int, num_cached: int) -> None:
    world = World(source, num_cached, skip_blocks)
    assert world.settle() == 0.0
    world.check_whole()
    assert world.outcome == "committed"
    assert world.num_repairs == 0
    assert len(world.first_tokens) == (source == "prefill")
    assert world.num_committed == (NUM_BLOCKS if source == "prefill" else max(num_cached, skip_blocks))


def num_messages(source: str) -> int:
    world = World(source)
    world.settle()
    return world.num_messages


EVERY_MESSAGE = [(source, i) for source in ("prefill", "cached") for i in range(num_messages(source))]


@pytest.mark.parametrize(("source", "index"), EVERY_MESSAGE)
def test_a_stream_cut_before_any_message_is_repaired_and_both_pools_are_whole(source: str, index: int) -> None:
    world = World(source)
    world.cut_before_message = index
    world.settle()
    world.check_whole()
    assert world.outcome == "committed"


@pytest.mark.parametrize("dies", ["holder", "consumer"])
@pytest.mark.parametrize(("source", "index"), EVERY_MESSAGE)
def test_a_side_that_dies_before_any_message_leaves_the_other_whole_within_the_lease(
    source: str, index: int, dies: str
) -> None:
    world = World(source)
    while world.num_messages <= index and world.outcome is None:
        for step in (
            world.deliver_to_holder,
            world.engine_step,
            world.engine_report,
            world.deliver_to_consumer,
            world.copy_reads,
        ):
            step()
        if world.num_messages <= index:
            world.copy_ends()
    if dies == "holder":
        world.kill_holder()
    else:
        world.abort()  # its machine ends as well; what is checked is the holder's side
        world.cut()
    assert world.settle() <= TIMES.lease_s
    world.check_whole()


@pytest.mark.parametrize("reads_before_expiry", [True, False])
def test_a_lease_that_expires_in_the_middle_of_a_copy_confirms_nothing_of_it(reads_before_expiry: bool) -> None:
    world = World()
    world.deliver_to_holder()
    world.engine_step()
    world.engine_step(NUM_BLOCKS)
    for _ in range(4):
        world.engine_report()
    for _ in range(3):
        world.deliver_to_consumer()
    assert world.attempt.copy is not None
    if reads_before_expiry:
        world.copy_reads()
    world.advance(TIMES.lease_s)  # the holder lets go of everything, and its engine uses the blocks again
    world.engine_step()
    world.copy_ends()
    assert world.num_committed == 0
    world.settle()
    world.check_whole()
    assert world.outcome == "committed"
    assert world.num_repairs == 1


def test_blocks_confirmed_before_a_holder_died_are_not_asked_for_again() -> None:
    world = World()
    while world.num_committed == 0:
        world.deliver_to_holder()
        world.engine_step()
        world.engine_report()
        world.deliver_to_consumer()
        world.copy_ends()
    confirmed = world.num_committed
    world.kill_holder()
    world.settle()
    world.check_whole()
    assert world.attempt.open.source.skip_blocks == confirmed
    assert world.outcome == "committed"


def test_an_abort_while_queued_is_never_computed() -> None:
    world = World()
    world.deliver_to_holder()
    world.abort()
    world.notify_holder()
    world.settle()
    assert world.attempt.engine.was_aborted
    assert all(content[0] == "nothing" for content in world.holder_pool.contents), "no block was ever filled"
    assert world.outcome == "aborted"

"""A worker whose hand-offs are staged, event by event and whatever happens: nothing stays behind."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handoffs import BLOCK_SIZE, LAYOUT
from kvtransfer.errors import Code, HandoffRefused
from kvtransfer.events import Filled
from kvtransfer.messages import Accepted, Confirmed, Ready
from kvtransfer.staging_area import StagingArea
from staged_holders import StagedHolders, Taker, complete_of

# --- event by event


async def test_blocks_are_announced_as_slots_and_the_pools_pins_go_back_at_once() -> None:
    world = StagedHolders(num_slots=16)
    taker = world.open_prefill(3)
    world.fill(0, 2)
    assert not any(isinstance(m, Ready) for m in taker.messages), "not before they are copied"
    assert world.engine.num_pins == 2
    await world.copy()
    ready = taker.messages[-1]
    assert isinstance(ready, Ready)
    assert (ready.first, len(ready.block_ids), ready.num_tokens, ready.fence) == (0, 2, 2 * BLOCK_SIZE, None)
    assert world.engine.num_pins == 0, "the consumer may take its time"
    assert world.area.num_free == 14
    taker.pull()
    assert taker.num_confirmed == 2
    assert world.area.num_free == 16
    world.fill(0, 1)
    assert complete_of(taker) is None, "the engine is done, but its last block is not announced"
    await world.copy()
    assert complete_of(taker) is not None
    taker.pull()
    assert taker.closed is not None
    assert taker.closed.code is Code.OK
    assert world.copies.fences == [0, 0], "each copy waits for the step that filled its blocks"
    await world.close()


async def test_blocks_wait_in_order_where_slots_are_scarce_and_a_hand_off_takes_no_more_than_its_share() -> None:
    world = StagedHolders(num_slots=8)  # two a hand-off, one at once
    taker = world.open_prefill(6)
    world.fill(0, 6)
    for _ in range(4):
        await world.copy()
    assert [m.block_ids for m in taker.messages if isinstance(m, Ready)] == [(1,), (2,)]
    assert [m.num_tokens for m in taker.messages if isinstance(m, Ready)] == [BLOCK_SIZE, 2 * BLOCK_SIZE]
    assert world.engine.num_pins == 4, "the others wait in the pool"
    other = world.open_prefill(1)
    world.fill(1, 1)
    await world.copy()
    assert complete_of(other) is not None, "it does not wait for a consumer that takes its time"
    await world.settle()
    assert [m.num_tokens for m in taker.messages if isinstance(m, Ready)] == [4, 8, 12, 16, 20, 23]
    assert taker.closed == other.closed
    await world.close()


async def test_one_slot_is_enough() -> None:
    world = StagedHolders(num_slots=1)
    takers = [world.open_prefill(5), world.open_prefill(3), world.open_cached(2)]
    await world.settle()
    assert [taker.closed and taker.closed.code for taker in takers] == [Code.OK] * 3
    assert [taker.num_confirmed for taker in takers[:2]] == [5, 3]
    await world.close()


async def test_hand_offs_take_turns() -> None:
    world = StagedHolders(num_slots=2)  # one a hand-off
    long, short = world.open_prefill(8), world.open_prefill(2)
    world.fill(0, 8)
    world.fill(1, 2)
    for _ in range(3):
        await world.copy()
        await world.copy()
        long.pull()
        short.pull()
    assert short.closed is not None
    assert long.num_confirmed == 3
    await world.settle()
    await world.close()


async def test_blocks_that_are_skipped_or_filled_again_are_not_copied() -> None:
    world = StagedHolders(num_slots=16)
    taker = world.open_prefill(6, skip_blocks=2)
    world.fill(0, 3)
    await world.copy()
    world.preempt(0)
    world.fill(0, 4)
    await world.copy()
    assert [(m.first, len(m.block_ids)) for m in taker.messages if isinstance(m, Ready)] == [(2, 1), (3, 1)]
    assert len(world.copies.fences) == 2
    await world.settle()
    assert taker.num_confirmed == 6
    await world.close()


@pytest.mark.parametrize(
    ("held", "skip", "slots", "announced"), [(5, 0, 8, 5), (5, 2, 8, 5), (5, 2, 1, 3), (0, 0, 8, 0), (2, 2, 8, 2)]
)
async def test_a_cached_prefix_is_as_long_as_there_are_slots_for_it(
    held: int, skip: int, slots: int, announced: int
) -> None:
    world = StagedHolders(num_slots=slots)
    taker = world.open_cached(5, skip)
    world.fill(0, held)
    await world.settle()
    accepted = taker.messages[0]
    assert isinstance(accepted, Accepted)
    assert accepted.num_blocks == announced
    assert taker.closed is not None
    assert taker.closed.code is Code.OK
    assert max(taker.num_confirmed, skip) == max(announced, skip)
    assert world.engine.num_pins == 0
    await world.close()


async def test_a_cached_prefix_while_all_slots_are_in_use_is_none() -> None:
    world = StagedHolders(num_slots=1)
    world.open_prefill(1)
    world.fill(0, 1)
    await world.copy()
    taker = world.open_cached(3)
    world.fill(1, 3)
    await world.copy()
    assert [type(m) for m in taker.messages][-1] is Confirmed
    assert taker.num_blocks == 0
    await world.close()


async def test_null_blocks_take_no_slots() -> None:
    world = StagedHolders(num_slots=8)
    taker = world.open_prefill(3)
    block_id = world.engine.new_block(taker.content(2))
    world._say(0, Filled(0, (0, 0, block_id), 11))
    await world.copy()
    await world.copy()
    assert [m.block_ids for m in taker.messages if isinstance(m, Ready)] == [(0, 0, 1)]
    assert world.area.num_free == 7
    await world.close()


async def test_an_abort_gives_back_what_waits_at_once_and_what_is_copied_when_the_copy_has_ended() -> None:
    world = StagedHolders(num_slots=8)
    taker = world.open_prefill(6)
    world.fill(0, 6)
    taker.leave()
    assert world.engine.aborted == ["handoff-0"]
    assert world.engine.num_pins == 1, "a block under a copy stays pinned"
    await world.copy()
    assert world.engine.num_pins == 0
    assert world.area.num_free == 8
    world._say(0, Filled(0, (world.engine.new_block(1),), 4))
    assert world.engine.num_pins == 0, "what comes late goes back"
    await world.close()


async def test_a_copy_that_fails_ends_its_hand_off_and_no_other() -> None:
    world = StagedHolders(num_slots=8)
    broken, whole = world.open_prefill(2), world.open_prefill(2)
    world.fill(0, 1)
    world.copies.fails = True
    await world.copy()
    world.copies.fails = False
    assert broken.closed is not None
    assert broken.closed.code is Code.INTERNAL
    assert broken.closed.message == "blocks could not be copied into host memory: the GPU is on fire"
    assert world.engine.aborted == ["handoff-0"]
    await world.settle()
    assert whole.num_confirmed == 2
    await world.close()


async def test_a_refusal_leaves_nothing_behind() -> None:
    world = StagedHolders(num_slots=8)
    world.engine.refusal = HandoffRefused(Code.RESOURCE_EXHAUSTED, "full")
    taker = world.open_prefill(2)
    assert taker.closed is not None
    assert (taker.closed.code, taker.closed.message) == (Code.RESOURCE_EXHAUSTED, "full")
    assert not world.staged._staged
    await world.close()


def test_an_area_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="of 63 bytes holds no block of 64"):
        StagingArea(LAYOUT, 63)


# --- whatever happens

HAPPENINGS = {
    "prefill": lambda w, i, n: w.open_prefill(1 + n % 7, i % 3),
    "cached": lambda w, i, n: w.open_cached(1 + n % 7, i % 3),
    "starts": lambda w, i, n: w.start(i),
    "fills": lambda w, i, n: w.fill(i, 1 + n % 4),
    "preempted": lambda w, i, n: w.preempt(i),
    "reads": lambda w, i, n: w.consumer(i, Taker.read),
    "pulls": lambda w, i, n: w.consumer(i, Taker.pull),
    "leaves": lambda w, i, n: w.consumer(i, Taker.leave),
    "fails": lambda w, i, n: w.engine_fails(i),
}
COPY = "copy"
FAULTS = ("leaves", "fails")
GOOD = (*(name for name in HAPPENINGS if name not in FAULTS), COPY)

happenings = st.lists(
    st.tuples(st.one_of(*[st.sampled_from(GOOD)] * 5, st.sampled_from(FAULTS)), st.integers(0, 5), st.integers(0, 11)),
    min_size=5,
    max_size=80,
)


async def play(world: StagedHolders, happened: list[tuple[str, int, int]]) -> None:
    for name, i, n in happened:
        if name == COPY:
            await world.copy()
        elif name not in ("prefill", "cached") or len(world.takers) < 6:
            HAPPENINGS[name](world, i, n)
            world.check()


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 9), happenings)
def test_pins_and_slots_all_come_back_whatever_happens_and_what_is_confirmed_is_right(
    num_slots: int, happened: list[tuple[str, int, int]]
) -> None:
    async def scenario() -> None:
        world = StagedHolders(num_slots)
        await play(world, happened)
        await world.close()

    asyncio.run(scenario())


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), happenings)
def test_without_faults_every_hand_off_comes_to_its_end(num_slots: int, happened: list[tuple[str, int, int]]) -> None:
    async def scenario() -> None:
        world = StagedHolders(num_slots)
        await play(world, [event for event in happened if event[0] not in FAULTS])
        await world.settle()
        for taker in world.takers:
            assert taker.closed is not None
            assert taker.closed.code is Code.OK
            assert taker.num_confirmed == max(taker.num_blocks, taker.open_message.source.skip_blocks)
        await world.close()

    asyncio.run(scenario())

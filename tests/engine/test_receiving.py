"""Requests whose KV comes from a peer: reserved, committed, run; or given up."""

import pytest

from engine.hash_executor import expected_tokens
from engine.sampling_params import FinishReason
from tests.engine.executors import VOCAB_SIZE
from tests.engine.harness import BLOCK_SIZE, Driver, check_idle, make_engine, make_request, prompt_of


def expected(request):
    return expected_tokens(request.prompt_token_ids, request.params, VOCAB_SIZE)


def fill(engine, target, tokens):
    """Does the peer's and the copier's work: writes what a prefill of these tokens would have left."""
    (table,) = target.block_tables
    pool = engine.executor._pool
    for position, token in enumerate(tokens):
        pool[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = ((position + 1) << 32) | token


def receiving(driver, request):
    """The target, once reserved."""
    driver.add(request)
    (target,) = driver.step().received_targets
    return target


def test_blocks_for_the_whole_prompt_are_reserved_when_request_is_admitted():
    driver = Driver(make_engine())
    target = receiving(driver, make_request("a", prompt_of(10), receives_kv=True))
    assert [len(table) for table in target.block_tables] == [3]
    assert target.num_cached_blocks == 0
    assert driver.admitted == ["a"]
    assert driver.engine.stats().num_receiving == 1
    assert not driver.engine.has_work  # until the worker says that something came
    driver.engine.check_integrity()


def test_own_cached_blocks_come_first_when_the_prompt_begins_with_them():
    driver = Driver(make_engine())
    driver.add(make_request("before", prompt_of(9)))
    driver.run()
    request = make_request("a", prompt_of(10), receives_kv=True)
    target = receiving(driver, request)
    assert target.num_cached_blocks == 2
    fill(driver.engine, target, request.prompt_token_ids)
    driver.engine.finish_receiving("a", 10, expected(request)[0])
    driver.run()
    assert {output.num_cached_tokens for output in driver.outputs["a"]} == {8}


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_request_decodes_from_received_blocks_when_all_are_here(length):
    driver = Driver(make_engine())
    request = make_request("a", prompt_of(length), max_tokens=6, receives_kv=True)
    target = receiving(driver, request)
    fill(driver.engine, target, request.prompt_token_ids)
    first, *rest = expected(request)
    driver.engine.commit_blocks("a", len(target.block_tables[0]))
    driver.engine.check_integrity()
    assert driver.engine.finish_receiving("a", length, first) is None
    driver.run()
    assert driver.tokens("a") == rest  # the first one has gone to the client already
    assert not any(output.is_first for output in driver.outputs["a"])
    assert driver.engine.stats().num_computed_tokens == 5
    check_idle(driver.engine)


def test_output_is_wrong_when_what_was_received_is():
    driver = Driver(make_engine())
    request = make_request("a", prompt_of(8), receives_kv=True)
    target = receiving(driver, request)
    fill(driver.engine, target, request.prompt_token_ids[:7])  # the last slot never came
    first, *rest = expected(request)
    driver.engine.finish_receiving("a", 8, first)
    assert driver.run().tokens("a") != rest


def test_request_ends_at_once_when_the_peers_token_is_its_last():
    driver = Driver(make_engine())
    request = make_request("a", prompt_of(8), max_tokens=1, receives_kv=True)
    receiving(driver, request)
    assert driver.engine.finish_receiving("a", 8, 5) is FinishReason.LENGTH
    stopped = make_request("b", prompt_of(8, 1), stop_token_ids=(5,), receives_kv=True)
    receiving(driver, stopped)
    assert driver.engine.finish_receiving("b", 8, 5) is FinishReason.STOP
    assert driver.run().outputs == {}
    check_idle(driver.engine)


@pytest.mark.parametrize("num_tokens", [0, 4, 6, 8, 9])
def test_rest_is_computed_here_when_only_a_prefix_was_received(num_tokens):
    driver = Driver(make_engine())
    request = make_request("a", prompt_of(9), receives_kv=True)
    target = receiving(driver, request)
    fill(driver.engine, target, request.prompt_token_ids[:num_tokens])
    driver.engine.commit_blocks("a", num_tokens // BLOCK_SIZE)
    driver.engine.finish_receiving("a", num_tokens, None)
    driver.run()
    assert driver.tokens("a") == expected(request)
    assert driver.outputs["a"][0].is_first
    assert driver.engine.stats().num_computed_tokens == max(1, 9 - num_tokens) + 3
    check_idle(driver.engine)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_rest_is_computed_here_when_the_peer_is_lost_after_its_token_was_delivered(length):
    request = make_request("a", prompt_of(length), receives_kv=True)
    first, *rest = expected(request)
    for num_confirmed in range(length // BLOCK_SIZE + 1):
        driver = Driver(make_engine())
        request = make_request("a", prompt_of(length), receives_kv=True)
        target = receiving(driver, request)
        fill(driver.engine, target, request.prompt_token_ids[: num_confirmed * BLOCK_SIZE])
        driver.engine.commit_blocks("a", num_confirmed)
        assert driver.engine.finish_receiving("a", num_confirmed * BLOCK_SIZE, first) is None
        assert driver.run().tokens("a") == rest
        check_idle(driver.engine)


def test_committed_blocks_count_when_the_peer_is_lost_and_nothing_else_is_said():
    driver = Driver(make_engine())
    request = make_request("a", prompt_of(9), receives_kv=True)
    target = receiving(driver, request)
    fill(driver.engine, target, request.prompt_token_ids[:4])
    driver.engine.commit_blocks("a", 1)
    driver.engine.finish_receiving("a", 0, None)
    assert driver.run().tokens("a") == expected(request)
    assert driver.engine.stats().num_computed_tokens == 5 + 3


def test_cached_block_is_never_written_again_when_its_last_token_is_computed_here():
    driver = Driver(make_engine())
    request = make_request("a", prompt_of(8), receives_kv=True)
    target = receiving(driver, request)
    fill(driver.engine, target, request.prompt_token_ids)
    driver.engine.commit_blocks("a", 2)
    assert len(driver.engine.cached_hashes()) == 1  # the last full block will be written once more
    driver.engine.finish_receiving("a", 8, None)
    driver.step()
    assert len(driver.engine.cached_hashes()) == 2
    assert driver.run().tokens("a") == expected(request)


def test_committed_blocks_are_found_by_others_while_the_rest_is_on_its_way():
    driver = Driver(make_engine())
    request = make_request("a", prompt_of(12), receives_kv=True)
    target = receiving(driver, request)
    fill(driver.engine, target, request.prompt_token_ids[:8])
    other = make_request("b", prompt_of(9))
    driver.engine.commit_blocks("a", 2)
    driver.add(other)
    driver.run()
    assert driver.tokens("b") == expected(other)
    assert driver.outputs["b"][0].num_cached_tokens == 8
    assert driver.engine.stats().num_receiving == 1
    driver.engine.abort("a")
    check_idle(driver.engine)


def test_reserved_blocks_are_not_touched_when_others_are_preempted():
    driver = Driver(make_engine(num_blocks=9, expected_growth_tokens=0))
    request = make_request("a", prompt_of(12), max_tokens=4, receives_kv=True)
    target = receiving(driver, request)
    fill(driver.engine, target, request.prompt_token_ids)
    memory = driver.engine.executor._pool
    before = memory[list(target.block_tables[0])].copy()
    others = [make_request(f"r{i}", prompt_of(6, i + 1), max_tokens=12) for i in range(2)]
    driver.add(*others)
    driver.run()
    assert driver.preempted
    for other in others:
        assert driver.tokens(other.request_id) == expected(other)
    assert (memory[list(target.block_tables[0])] == before).all()
    first, *rest = expected(request)
    driver.engine.finish_receiving("a", 12, first)
    assert driver.run().tokens("a") == rest
    check_idle(driver.engine)


def test_runner_waits_for_receivers_when_they_fill_the_pool():
    driver = Driver(make_engine(num_blocks=9, expected_growth_tokens=0))
    runner = make_request("runner", prompt_of(8), max_tokens=20)
    driver.add(runner)
    driver.step()
    request = make_request("receiver", prompt_of(20, 1), max_tokens=8, receives_kv=True)
    target = receiving(driver, request)
    for _ in range(5):
        driver.step()
    assert "runner" in driver.preempted  # nobody newer runs, and the receiver's blocks are not to be had
    assert not driver.engine.has_work
    driver.engine.check_integrity()
    fill(driver.engine, target, request.prompt_token_ids)
    first, *rest = expected(request)
    driver.engine.finish_receiving("receiver", 20, first)
    driver.run()
    assert driver.tokens("runner") == expected(runner)
    assert driver.tokens("receiver") == rest
    check_idle(driver.engine)


def test_received_request_is_computed_here_when_it_is_preempted():
    driver = Driver(make_engine(num_blocks=9, expected_growth_tokens=0))
    request = make_request("a", prompt_of(12), max_tokens=16, receives_kv=True, arrival_time=1.0)
    target = receiving(driver, request)
    fill(driver.engine, target, request.prompt_token_ids)
    first, *rest = expected(request)
    older = make_request("older", prompt_of(8, 1), max_tokens=24)
    driver.add(older)
    driver.step()
    driver.engine.finish_receiving("a", 12, first)
    driver.run()
    assert "a" in driver.preempted
    assert sum(len(result.received_targets) for result in driver.results) == 1
    assert driver.tokens("a") == rest
    assert driver.tokens("older") == expected(older)
    check_idle(driver.engine)


def test_receiver_waits_when_the_pool_cannot_hold_its_growth():
    driver = Driver(make_engine(num_blocks=9, expected_growth_tokens=16))
    driver.add(make_request("a", prompt_of(8), max_tokens=6))  # two blocks, two more to come
    driver.step()
    driver.add(make_request("b", prompt_of(8, 1), max_tokens=16, receives_kv=True))
    assert driver.step().received_targets == ()
    while driver.engine.stats().num_running:
        driver.step()
    (target,) = driver.step().received_targets
    assert target.request_id == "b"


def test_receivers_count_as_running_when_seats_are_given():
    driver = Driver(make_engine(max_num_seqs=1))
    receiving(driver, make_request("a", receives_kv=True))
    driver.add(make_request("b"))
    driver.step()
    assert driver.admitted == ["a"]
    driver.engine.abort("a")
    driver.run()
    assert driver.admitted == ["a", "b"]


def test_receiver_is_admitted_when_the_step_has_no_tokens_left():
    driver = Driver(make_engine(max_num_batched_tokens=8))
    driver.add(make_request("long", prompt_of(30)), make_request("a", receives_kv=True))
    assert [target.request_id for target in driver.step().received_targets] == ["a"]


@pytest.mark.parametrize("committed", [0, 1, 2])
def test_abort_frees_the_reservation_when_so_many_blocks_are_committed(committed):
    driver = Driver(make_engine())
    request = make_request("a", prompt_of(10), receives_kv=True)
    target = receiving(driver, request)
    fill(driver.engine, target, request.prompt_token_ids)
    driver.engine.commit_blocks("a", committed)
    assert driver.engine.abort("a")
    assert not driver.engine.abort("a")
    check_idle(driver.engine)
    assert driver.engine.stats().num_cached_blocks == committed


def test_late_events_are_refused_when_the_request_has_ended():
    driver = Driver(make_engine())
    receiving(driver, make_request("a", prompt_of(10), receives_kv=True))
    driver.engine.abort("a")
    for late in (
        lambda: driver.engine.commit_blocks("a", 1),
        lambda: driver.engine.finish_receiving("a", 10, 5),
        lambda: driver.engine.finish_receiving("a", 0, None),
    ):
        with pytest.raises(ValueError, match="no request a is receiving"):
            late()


@pytest.mark.parametrize(
    ("num_tokens", "first_token", "message"),
    [(11, None, "11 tokens received of 10"), (-1, None, "-1 tokens"), (11, 5, "11 tokens received of 10")],
)
def test_contradicting_numbers_are_refused_when_receiving_ends(num_tokens, first_token, message):
    driver = Driver(make_engine())
    receiving(driver, make_request("a", prompt_of(10), receives_kv=True))
    with pytest.raises(ValueError, match=message):
        driver.engine.finish_receiving("a", num_tokens, first_token)
    assert driver.engine.stats().num_receiving == 1


def test_pulled_prefix_is_handed_on_when_a_prefill_only_request_receives_it():
    driver = Driver(make_engine())
    request = make_request("a", prompt_of(11), receives_kv=True, prefill_only=True)
    target = receiving(driver, request)
    fill(driver.engine, target, request.prompt_token_ids[:8])
    driver.engine.commit_blocks("a", 2)
    with pytest.raises(ValueError, match="prefilled here"):
        driver.engine.finish_receiving("a", 11, 5)
    driver.engine.finish_receiving("a", 8, None)
    (filled,) = driver.step().filled
    assert (filled.first, filled.block_ids, filled.num_tokens) == (0, target.block_tables[0], 11)
    assert driver.tokens("a") == expected(request)[:1]
    driver.engine.unpin(filled.block_ids)
    check_idle(driver.engine)


def test_resumed_request_goes_on_when_its_kv_is_received():
    whole = expected(make_request("a", prompt_of(6), max_tokens=8))
    request = make_request("a", prompt_of(6), max_tokens=8, resume_token_ids=whole[:4], receives_kv=True)
    driver = Driver(make_engine())
    target = receiving(driver, request)
    fill(driver.engine, target, request.token_ids)
    driver.engine.finish_receiving("a", 10, whole[4])
    assert driver.run().tokens("a") == whole[5:]
    check_idle(driver.engine)

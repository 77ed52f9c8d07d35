"""What the scheduler decides: budgets, order, admission, preemption, refusal."""

import pytest

from engine.errors import QueueFull
from tests.engine.harness import Driver, check_idle, make_engine, make_request, prompt_of


class RecordingExecutor:
    """Passes every step on, and keeps what it was: (request, tokens, samples) of each."""

    def __init__(self, inner):
        self.inner = inner
        self.steps = []

    def execute(self, step):
        self.steps.append([(r.request_id, len(r.token_ids), r.sampling is not None) for r in step.requests])
        return self.inner.execute(step)


def recorded(**config):
    """A driver, and the list of its steps."""
    driver = Driver(make_engine(**config))
    driver.engine.executor = executor = RecordingExecutor(driver.engine.executor)
    return driver, executor.steps


# --- the step


def test_decodes_come_first_and_chunks_take_the_rest_when_budget_is_short():
    driver, steps = recorded(max_num_batched_tokens=8)
    driver.add(make_request("a", prompt_of(6, 1)), make_request("b", prompt_of(9, 2)))
    driver.run()
    assert steps == [
        [("a", 6, True), ("b", 2, False)],
        [("a", 1, True), ("b", 7, True)],
        [("a", 1, True), ("b", 1, True)],
        [("a", 1, True), ("b", 1, True)],
        [("b", 1, True)],
    ]


def test_a_prompts_last_token_is_the_prompts_also_when_it_comes_alone():
    driver = Driver(make_engine(max_num_batched_tokens=8))
    steps = []
    inner = driver.engine.executor.execute
    driver.engine.executor.execute = lambda step: steps.append(step.requests) or inner(step)
    driver.add(make_request("a", prompt_of(9)))
    driver.run()
    shares = [(len(share.token_ids), share.is_prompt) for (share,) in steps]
    assert shares == [(8, True), (1, True), (1, False), (1, False), (1, False)]


def test_no_step_exceeds_the_budget_when_many_prompts_wait():
    driver, steps = recorded(max_num_batched_tokens=9)
    driver.add(*(make_request(f"r{i}", prompt_of(7 + i, i)) for i in range(6)))
    driver.run()
    assert all(sum(tokens for _, tokens, _ in step) <= 9 for step in steps)
    assert [result.num_computed_tokens for result in driver.results] == [sum(n for _, n, _ in step) for step in steps]


def test_nobody_starts_when_as_many_run_as_may():
    driver, steps = recorded(max_num_seqs=2)
    driver.add(*(make_request(f"r{i}", prompt_of(5, i)) for i in range(4)))
    driver.run()
    assert max(len(step) for step in steps) == 2
    assert driver.admitted == ["r0", "r1", "r2", "r3"]


def test_smaller_priority_starts_sooner_then_earlier_arrival():
    driver, _ = recorded(max_num_seqs=1)
    driver.add(
        make_request("late", priority=0, arrival_time=2.0),
        make_request("early", priority=0, arrival_time=1.0),
        make_request("urgent", priority=-1, arrival_time=3.0),
        make_request("same time, added later", priority=0, arrival_time=1.0),
    )
    driver.run()
    assert driver.admitted == ["urgent", "early", "same time, added later", "late"]


def test_times_of_arrival_and_start_are_told_with_every_token():
    driver, _ = recorded(max_num_seqs=1)
    driver.add(make_request("a", arrival_time=0.25), make_request("b", arrival_time=0.5))
    driver.run()
    assert {(o.arrival_time, o.first_scheduled_time) for o in driver.outputs["a"]} == {(0.25, 1.0)}
    assert {(o.arrival_time, o.first_scheduled_time) for o in driver.outputs["b"]} == {(0.5, 5.0)}


def test_start_time_is_the_first_one_when_request_was_preempted():
    driver, _ = recorded(num_blocks=6, expected_growth_tokens=0)
    driver.add(*(make_request(f"r{i}", prompt_of(6, i), max_tokens=12) for i in range(2)))
    driver.run()
    assert driver.preempted == ["r1"]
    assert {output.first_scheduled_time for output in driver.outputs["r1"]} == {1.0}
    assert driver.admitted == ["r0", "r1"]


# --- admission


def test_growth_of_those_who_run_is_kept_free_when_another_would_start():
    # Ten usable blocks. The first has 2, and is expected to need 2 more; so has the second; the third must wait.
    driver, _ = recorded(num_blocks=11, expected_growth_tokens=8)
    driver.add(*(make_request(f"r{i}", prompt_of(7, i), max_tokens=30) for i in range(3)))
    driver.step()
    assert driver.admitted == ["r0", "r1"]
    driver.engine.abort("r0")
    driver.step()
    assert driver.admitted == ["r0", "r1", "r2"]


def test_growth_counts_only_what_may_still_be_generated():
    driver, _ = recorded(num_blocks=11, expected_growth_tokens=1000)
    driver.add(*(make_request(f"r{i}", prompt_of(7, i), max_tokens=2) for i in range(5)))
    driver.step()
    assert len(driver.admitted) == 5


def test_request_starts_when_alone_though_its_growth_is_not_there():
    driver, _ = recorded(num_blocks=9, expected_growth_tokens=8)
    driver.add(make_request("handed off", prompt_of(12, 1), prefill_only=True))
    pins = [block_id for filled in driver.step().filled for block_id in filled.block_ids]
    driver.add(make_request("a", prompt_of(18), max_tokens=10))  # five blocks, and two more to come
    driver.run()
    assert driver.preempted == ["a"]  # by itself: five blocks are all there are
    assert len(driver.tokens("a")) == 3
    driver.engine.unpin(pins)
    assert len(driver.run().tokens("a")) == 10


def test_small_request_does_not_overtake_a_large_one_that_waits():
    driver, _ = recorded(num_blocks=9, expected_growth_tokens=0)
    driver.add(
        make_request("first", prompt_of(17), max_tokens=4),
        make_request("large", prompt_of(16, 1), max_tokens=2),
        make_request("small", prompt_of(1, 2), max_tokens=1),
    )
    driver.run()
    assert driver.admitted == ["first", "large", "small"]
    assert driver.preempted == []


def test_prefix_that_others_hold_costs_nothing_when_room_is_scarce():
    driver, _ = recorded(num_blocks=8, expected_growth_tokens=0)
    prompt = prompt_of(17)
    driver.add(make_request("a", prompt, max_tokens=8))
    driver.step()
    driver.add(make_request("b", prompt, max_tokens=2))  # shares four of its five blocks; two are free
    driver.step()
    assert driver.admitted == ["a", "b"]
    driver.engine.check_integrity()


# --- preemption


def test_newest_request_is_preempted_when_the_pool_is_full():
    driver, _ = recorded(num_blocks=10, expected_growth_tokens=0)
    driver.add(*(make_request(f"r{i}", prompt_of(10, i), max_tokens=10, arrival_time=i) for i in (2, 0, 1)))
    while not driver.preempted:
        driver.step()
    assert driver.preempted == ["r2"]


def test_least_urgent_request_is_preempted_when_the_pool_is_full():
    driver, _ = recorded(num_blocks=10, expected_growth_tokens=0)
    driver.add(*(make_request(f"r{i}", prompt_of(10, i), max_tokens=10, priority=-i) for i in range(3)))
    while not driver.preempted:
        driver.step()
    assert driver.preempted == ["r0"]


def test_preempted_request_is_the_next_to_start_when_others_wait():
    driver, steps = recorded(num_blocks=8, expected_growth_tokens=0, max_num_seqs=2)
    driver.add(*(make_request(f"r{i}", prompt_of(6, i), max_tokens=14) for i in range(3)))
    while not driver.preempted:
        driver.step()
    del steps[:]
    driver.run()
    resumed = next(i for i, step in enumerate(steps) if any(name == "r1" for name, _, _ in step))
    started = next(i for i, step in enumerate(steps) if any(name == "r2" for name, _, _ in step))
    assert resumed <= started
    assert len(driver.tokens("r1")) == 14


def test_own_blocks_found_again_are_no_hits_when_request_was_preempted():
    driver, _ = recorded(num_blocks=8, expected_growth_tokens=0)
    driver.add(*(make_request(f"r{i}", prompt_of(6, i), max_tokens=14) for i in range(3)))
    driver.run()
    stats = driver.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_computed_tokens < sum(6 + 14 - 1 for _ in range(3)) + stats.num_preemptions * 19  # some were found
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (18, 0)
    assert all(output.num_cached_tokens == 0 for outputs in driver.outputs.values() for output in outputs)


def test_hits_are_counted_in_tokens_when_prompts_share_a_prefix():
    driver, _ = recorded()
    driver.add(make_request("a", prompt_of(10)))
    driver.run()
    driver.add(make_request("b", prompt_of(10)))
    driver.run()
    stats = driver.engine.stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (20, 8)


def test_other_tenants_blocks_are_not_found_when_salts_differ():
    driver, _ = recorded()
    for salt in ("", "tenant", "other tenant"):
        driver.add(make_request(salt, prompt_of(10), cache_salt=salt))
        driver.run()
        assert driver.outputs[salt][0].num_cached_tokens == 0


# --- refusal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": [1, 97]}, r"token id 97 of request bad is not in the vocabulary \[0, 97\)"),
        ({"prompt": [-1, 5]}, "token id -1"),
        ({"resume_token_ids": [100]}, "token id 100"),
        ({"logit_bias": {500: 1.0}}, "logit_bias token id 500"),
        ({"prompt": [1] * 64}, "has 64 tokens: .* max_model_len=64"),
        ({"prompt": [1] * 30, "max_tokens": 4}, r"prompt of 30 tokens with max_tokens=4 needs 9 blocks .* has 8"),
    ],
)
def test_request_is_refused_with_numbers_when_it_is_no_good(options, message):
    driver = Driver(make_engine(num_blocks=9))
    with pytest.raises(ValueError, match=message):
        driver.add(make_request("bad", **options))
    assert not driver.engine.has_work
    check_idle(driver.engine)
    good = make_request("good", [1] * 30, max_tokens=3)
    driver.add(good)
    assert len(driver.run().tokens("good")) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "prompt of request bad is empty"),
        ({"resume_token_ids": [1, 2], "max_tokens": 2}, "resumes with 2 tokens, but max_tokens=2"),
    ],
)
def test_request_cannot_be_made_when_there_is_nothing_to_compute(options, message):
    with pytest.raises(ValueError, match=message):
        make_request("bad", **options)


def test_only_the_prompt_must_fit_when_request_is_prefilled_only():
    driver = Driver(make_engine(num_blocks=9))
    driver.add(make_request("a", prompt_of(32), max_tokens=1000, prefill_only=True))
    with pytest.raises(ValueError, match="never fit"):
        driver.add(make_request("b", prompt_of(33), prefill_only=True))


def test_second_request_of_a_name_is_refused_while_the_first_is_here():
    driver = Driver(make_engine())
    driver.add(make_request("a"))
    with pytest.raises(ValueError, match="request a is here already"):
        driver.add(make_request("a"))
    driver.run()
    driver.add(make_request("a"))
    assert len(driver.run().tokens("a")) == 8


def test_request_is_refused_when_too_many_wait():
    driver = Driver(make_engine(max_waiting=2))
    driver.add(make_request("a"), make_request("b"))
    with pytest.raises(QueueFull, match="2 requests"):
        driver.add(make_request("c"))
    driver.step()
    driver.add(make_request("c"))
    driver.run()
    check_idle(driver.engine)


# --- abort


@pytest.mark.parametrize("num_steps", range(6))
def test_abort_leaves_nothing_behind_when_it_comes_after_so_many_steps(num_steps):
    driver = Driver(make_engine(max_num_batched_tokens=8))
    driver.add(make_request("a", prompt_of(20)))
    for _ in range(num_steps):
        driver.step()
    assert driver.engine.abort("a")
    assert not driver.engine.abort("a")
    driver.run()
    check_idle(driver.engine)


def test_abort_of_a_stranger_does_nothing():
    assert not make_engine().abort("nobody")


def test_aborted_request_never_computes_when_it_still_waited():
    driver, steps = recorded(max_num_seqs=1)
    driver.add(make_request("a"), make_request("b"))
    driver.step()
    driver.engine.abort("b")
    assert driver.engine.stats().num_waiting == 0
    driver.run()
    assert all(name == "a" for step in steps for name, _, _ in step)


# --- nothing to do


def test_idle_engine_has_no_work():
    engine = make_engine()
    assert not engine.has_work
    assert engine.step(1.0).outputs == ()
    assert not engine.has_work


def test_blocked_queue_is_no_work_until_something_happens():
    driver = Driver(make_engine(num_blocks=9))
    driver.add(make_request("a", prompt_of(28), prefill_only=True))
    pins = [block_id for filled in driver.step().filled for block_id in filled.block_ids]
    driver.add(make_request("b", prompt_of(20, 1)))
    assert driver.engine.has_work
    driver.step()
    assert not driver.engine.has_work
    driver.engine.unpin(pins[:2])
    assert driver.engine.has_work
    driver.step()
    assert not driver.engine.has_work  # two more blocks are not enough
    driver.engine.unpin(pins[2:])
    assert len(driver.run().tokens("b")) == 4


# --- cost


def test_allocations_are_counted_in_new_blocks_when_a_request_decodes_in_a_large_pool(monkeypatch):
    driver = Driver(make_engine(num_blocks=5000, max_model_len=4000))
    driver.add(make_request("a", prompt_of(2000), max_tokens=40))
    while not driver.tokens("a"):
        driver.step()
    pool = driver.engine._pool
    popped, registered = [], []
    popleft_many, register = pool.free_queue.popleft_many, pool.register
    monkeypatch.setattr(pool.free_queue, "popleft_many", lambda count: popped.append(count) or popleft_many(count))
    monkeypatch.setattr(pool, "register", lambda *args: registered.append(args) or register(*args))
    tables = driver.engine._manager.block_tables("a")
    driver.run()
    assert len(tables[0]) == 510  # for 2,039 tokens: the last one's KV is never computed
    assert sum(popped) == 10
    assert len(registered) == 9


def test_stalled_head_is_looked_at_by_bisection_when_its_prompt_is_long(monkeypatch):
    driver = Driver(make_engine(num_blocks=1100, max_model_len=4300, max_num_batched_tokens=4096))
    driver.add(make_request("a", prompt_of(4000), max_tokens=64))
    driver.add(make_request("b", prompt_of(2000) + prompt_of(2000, 1), max_tokens=64))
    driver.step()
    assert driver.admitted == ["a"]
    pool = driver.engine._pool
    lookups, walks = [], []
    is_cached, cached_chain = pool.is_cached, pool.cached_chain
    monkeypatch.setattr(pool, "is_cached", lambda *args: lookups.append(args) or is_cached(*args))
    monkeypatch.setattr(pool, "cached_chain", lambda *args: walks.append(args) or cached_chain(*args))
    driver.step()
    assert 0 < len(lookups) <= 11
    assert walks == []

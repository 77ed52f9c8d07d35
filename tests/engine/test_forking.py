"""Several choices of one prompt: it is computed once, and its blocks are shared until somebody writes."""

import pytest

from engine.errors import QueueFull
from engine.hash_executor import expected_prompt_logprobs
from tests.engine.executors import VOCAB_SIZE
from tests.engine.forks import check, expected, names, recorded
from tests.engine.harness import Driver, check_idle, make_choices, make_engine, make_request, prompt_of

# --- sharing


def test_four_choices_of_a_thousand_tokens_hold_the_prompts_blocks_once_and_copy_one_each_but_the_last():
    driver = Driver(make_engine(num_blocks=200, block_size=16, max_model_len=2000, max_num_batched_tokens=256))
    prompt, forks = make_choices(prompt=prompt_of(1000), max_tokens=30)
    driver.add_choices(prompt, forks)
    while not driver.outputs:
        driver.step()
        assert driver.engine.stats().num_active_blocks == 63
    assert driver.engine.stats().num_computed_tokens == 1000
    result = driver.step()  # each writes its first token behind the prompt's
    assert driver.engine.stats().num_active_blocks == 63 + 3
    assert (result.num_computed_tokens, driver.engine.stats().num_computed_tokens) == (4, 1004)
    driver.engine.check_integrity()
    while driver.engine.has_work:
        driver.step()
        assert driver.engine.stats().num_active_blocks <= 63 + 3 + 4 * 2  # up to 1,029 tokens: two blocks more for each
    assert driver.engine.stats().num_computed_tokens == 1000 + 4 * 29
    check(driver, forks)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_only_a_block_that_the_prompt_fills_in_part_is_copied(length):
    driver = Driver(make_engine())
    steps = recorded(driver)
    prompt, forks = make_choices(prompt=prompt_of(length), seeds=(0, 1, 2), max_tokens=9)
    driver.add_choices(prompt, forks)
    driver.run()
    copies = [copy for step in steps for copy in step.block_copies]
    if length % 4 == 0:
        assert copies == []
    else:
        assert [len(step.block_copies) for step in steps] == [0, 2] + [0] * (len(steps) - 2)
        assert len({source for source, _ in copies}) == 1
        assert len({target for _, target in copies}) == 2
    check(driver, forks)


def test_all_first_tokens_come_in_one_step_in_order_and_the_prompt_has_no_output():
    driver = Driver(make_engine())
    prompt, forks = make_choices(prompt=prompt_of(6), seeds=(7, 3, 5))
    driver.add_choices(prompt, forks)
    assert names(driver.step()) == ["a.0", "a.1", "a.2"]
    assert driver.admitted == ["a"]
    check(driver.run(), forks)
    assert "a" not in driver.outputs
    assert not driver.engine.abort("a")


def test_forks_of_equal_seeds_have_equal_texts_and_others_do_not():
    driver = Driver(make_engine())
    prompt, forks = make_choices(prompt=prompt_of(6), seeds=(1, 1, 2), max_tokens=8)
    driver.add_choices(prompt, forks)
    check(driver.run(), forks)
    assert driver.tokens("a.0") == driver.tokens("a.1") != driver.tokens("a.2")


def test_one_fork_is_a_request_like_any_other():
    driver = Driver(make_engine())
    prompt, forks = make_choices(prompt=prompt_of(6), seeds=(4,))
    driver.add_choices(prompt, forks)
    check(driver.run(), forks)
    assert driver.engine.stats().num_computed_tokens == 6 + 3


def test_what_was_cached_and_when_it_began_is_the_prompts():
    driver = Driver(make_engine())
    driver.add(make_request("before", prompt_of(9)))
    driver.run()
    prompt, forks = make_choices(prompt=prompt_of(11), arrival_time=2.5)
    driver.add_choices(prompt, forks)
    driver.run()
    outputs = [output for fork in forks for output in driver.outputs[fork.request_id]]
    assert {(o.num_cached_tokens, o.arrival_time, o.first_scheduled_time) for o in outputs} == {(8, 2.5, 5.0)}
    stats = driver.engine.stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (9 + 11, 8)


def test_blocks_that_forks_filled_are_found_by_a_next_turn():
    driver = Driver(make_engine())
    prompt, forks = make_choices(prompt=prompt_of(6), seeds=(0, 1, 2), max_tokens=7)
    driver.add_choices(prompt, forks)
    check(driver.run(), forks)
    for fork in forks:
        following = make_request(f"after {fork.request_id}", [*fork.prompt_token_ids, *expected(fork), 1])
        driver.add(following)
        driver.run()
        assert driver.outputs[following.request_id][0].num_cached_tokens == 12
        assert driver.tokens(following.request_id) == expected(following)
    check_idle(driver.engine)


def test_forks_that_wait_count_as_waiting_but_have_no_tokens_to_compute():
    driver = Driver(make_engine(max_num_batched_tokens=8))
    driver.add_choices(*make_choices(prompt=prompt_of(10)))
    stats = driver.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (0, 5, 10)
    driver.step()
    stats = driver.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (1, 4, 2)
    driver.step()
    stats = driver.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (4, 0, 4)


# --- pools that are too small


@pytest.mark.parametrize("num_blocks", [5, 6, 7, 9])
def test_texts_are_right_when_forks_preempt_each_other(num_blocks):
    driver = Driver(make_engine(num_blocks=num_blocks, expected_growth_tokens=0))
    prompt, forks = make_choices(prompt=prompt_of(6), max_tokens=10)
    driver.add_choices(prompt, forks)
    while driver.engine.has_work:
        driver.step()
        driver.engine.check_integrity()
    assert driver.preempted
    check(driver, forks)


def test_preempted_prompt_keeps_its_forks():
    driver = Driver(make_engine(num_blocks=9, max_num_batched_tokens=2, max_num_seqs=2, expected_growth_tokens=0))
    older = make_request("older", prompt_of(4, 1), max_tokens=20)
    driver.add(older)
    driver.step()
    prompt, forks = make_choices(prompt=prompt_of(18), seeds=(0, 1, 2), max_tokens=3)
    driver.add_choices(prompt, forks)
    driver.run()
    assert "a" in driver.preempted
    assert driver.tokens("older") == expected(older)
    check(driver, forks)


def test_growth_and_copies_of_all_forks_are_kept_free_when_others_would_start():
    # 15 usable blocks. The prompt holds 2, one full; each of four forks comes to fill 3 of its own: 13 in all.
    driver = Driver(make_engine(num_blocks=16, expected_growth_tokens=8))
    driver.add_choices(*make_choices(prompt=prompt_of(7), max_tokens=30))
    driver.add(make_request("small", prompt_of(4, 1), max_tokens=1), make_request("b", prompt_of(9, 2), max_tokens=1))
    driver.step()
    assert driver.admitted == ["a", "small"]  # one block; "b" needs three
    # The forks are yet to write, and to take their copies for it.
    assert driver.engine.stats().num_active_blocks == 2
    driver.step()
    assert driver.admitted == ["a", "small"]


# --- refusal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": (1, 2, 4)}, "another prompt_token_ids than its prompt a"),
        ({"cache_salt": "tenant"}, "another cache_salt"),
        ({"priority": 1}, "another priority"),
        ({"arrival_time": 1.0}, "another arrival_time"),
        ({"prefill_only": True}, "another prefill_only"),
        ({"max_tokens": 5}, "more parameters than the seed"),
        ({"receives_kv": True}, "receives no KV of its own"),
        ({"resume_token_ids": [4]}, "resumes with tokens"),
    ],
)
def test_fork_is_refused_when_it_is_not_of_this_prompt(changes, message):
    driver = Driver(make_engine())
    prompt, forks = make_choices(seeds=(0, 1))
    options = {"prompt": (1, 2, 3), "temperature": 1.0, **changes}
    with pytest.raises(ValueError, match=message):
        driver.add_choices(prompt, [*forks, make_request("other", **options)])
    check_idle(driver.engine)
    driver.add_choices(prompt, forks)
    check(driver.run(), forks)


def test_choices_are_refused_whole_when_a_name_is_taken_or_too_many_wait():
    driver = Driver(make_engine(max_waiting=3))
    driver.add(make_request("a.1"))
    prompt, forks = make_choices(seeds=(0, 1))
    with pytest.raises(ValueError, match=r"request a\.1 is here already"):
        driver.add_choices(prompt, forks)
    with pytest.raises(ValueError, match=r"request a\.0 is here already"):
        driver.add_choices(prompt, [forks[0], forks[0]])
    driver.add_choices(*make_choices("b", seeds=(0, 1)))
    with pytest.raises(QueueFull):
        driver.add_choices(*make_choices("c", seeds=(0, 1)))
    driver.run()
    driver.add_choices(prompt, forks)
    driver.run()
    check_idle(driver.engine)


def test_choices_are_refused_when_one_of_them_could_not_run_alone():
    driver = Driver(make_engine(num_blocks=9))
    with pytest.raises(ValueError, match="never fit"):
        driver.add_choices(*make_choices(prompt=[1] * 30, max_tokens=4))
    prompt, forks = make_choices(prompt=[1] * 30, max_tokens=3)
    driver.add_choices(prompt, forks)
    check(driver.run(), forks)


# --- with log-probabilities of the prompt


def test_every_fork_is_told_the_same_log_probabilities_of_the_prompt_once():
    driver = Driver(make_engine(max_num_batched_tokens=8))
    prompt, forks = make_choices(prompt=prompt_of(14), prompt_logprobs=2)
    driver.add_choices(prompt, forks)
    check(driver.run(), forks)
    told = [[output.prompt_logprobs for output in driver.outputs[fork.request_id]] for fork in forks]
    assert told[0][0] == expected_prompt_logprobs(prompt.prompt_token_ids, prompt.params, VOCAB_SIZE)
    assert all(each[0] is told[0][0] and each[1:] == [None] * 3 for each in told)

"""Several choices of one prompt that a peer has computed: they go on from its blocks and its tokens."""

import pytest

from tests.engine.forks import check, expected, recorded
from tests.engine.harness import Driver, check_idle, make_choices, make_engine, make_request, prompt_of


def fill(engine, target, tokens):
    (table,) = target.block_tables
    for position, token in enumerate(tokens):
        engine.executor._pool[table[position // 4], position % 4] = ((position + 1) << 32) | token


def receiving(driver, prompt, forks):
    driver.add_choices(prompt, forks)
    (target,) = driver.step().received_targets
    return target


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_forks_go_on_from_received_blocks_and_tokens(length):
    driver = Driver(make_engine())
    prompt, forks = make_choices(prompt=prompt_of(length), max_tokens=6, receives_kv=True)
    target = receiving(driver, prompt, forks)
    stats = driver.engine.stats()
    assert (stats.num_receiving, stats.num_waiting) == (1, 4)
    fill(driver.engine, target, prompt.prompt_token_ids)
    tokens = {fork.request_id: expected(fork)[0] for fork in forks}
    assert driver.engine.finish_receiving("a", length, None, {**tokens, "gone": 5}) is None
    driver.engine.check_integrity()
    assert driver.engine.stats().num_running == 4
    driver.run()
    for fork in forks:
        assert driver.tokens(fork.request_id) == expected(fork)[1:]
        assert not any(output.is_first for output in driver.outputs[fork.request_id])
    assert driver.engine.stats().num_computed_tokens == 4 * 5
    check_idle(driver.engine)


def test_received_forks_without_a_seat_wait_with_their_tokens():
    driver = Driver(make_engine(max_num_seqs=2))
    prompt, forks = make_choices(prompt=prompt_of(6), receives_kv=True)
    target = receiving(driver, prompt, forks)
    fill(driver.engine, target, prompt.prompt_token_ids)
    driver.engine.finish_receiving("a", 6, None, {fork.request_id: expected(fork)[0] for fork in forks})
    stats = driver.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_receiving) == (2, 2, 0)
    driver.engine.check_integrity()
    driver.run()
    for fork in forks:
        assert driver.tokens(fork.request_id) == expected(fork)[1:]
    check_idle(driver.engine)


@pytest.mark.parametrize("num_tokens", [0, 4, 6, 8, 9])
def test_first_tokens_are_sampled_here_when_only_a_prefix_was_received(num_tokens):
    driver = Driver(make_engine())
    prompt, forks = make_choices(prompt=prompt_of(9), receives_kv=True)
    target = receiving(driver, prompt, forks)
    fill(driver.engine, target, prompt.prompt_token_ids[:num_tokens])
    driver.engine.commit_blocks("a", num_tokens // 4)
    assert driver.engine.finish_receiving("a", num_tokens, None) is None
    check(driver.run(), forks)
    assert driver.engine.stats().num_computed_tokens == max(1, 9 - num_tokens) + 4 * 3


@pytest.mark.parametrize("length", [1, 4, 5, 7, 8, 9])
def test_texts_go_on_when_the_peer_is_lost_after_its_tokens_were_delivered(length):
    for num_confirmed in range(length // 4 + 1):
        driver = Driver(make_engine())
        prompt, forks = make_choices(prompt=prompt_of(length), max_tokens=6, receives_kv=True)
        target = receiving(driver, prompt, forks)
        fill(driver.engine, target, prompt.prompt_token_ids[: num_confirmed * 4])
        driver.engine.commit_blocks("a", num_confirmed)
        driver.engine.abort("a.2")
        alive = [forks[0], forks[1], forks[3]]
        tokens = {fork.request_id: expected(fork)[0] for fork in alive}
        driver.engine.finish_receiving("a", num_confirmed * 4, None, tokens)
        driver.engine.check_integrity()
        computed = recorded(driver)
        driver.run()
        if num_confirmed * 4 < length:
            assert not computed[0].requests[0].samplings, "the prompt is computed, and its forks have their tokens"
        for fork in alive:
            assert driver.tokens(fork.request_id) == expected(fork)[1:]
            assert not any(output.is_first for output in driver.outputs[fork.request_id])
        # What was not confirmed is computed once, not by each.
        assert driver.engine.stats().num_computed_tokens <= length - min(num_confirmed * 4, length - 1) + 3 * 5
        check_idle(driver.engine)


@pytest.mark.parametrize("num_tokens", [0, 8])
def test_forks_that_end_with_the_peers_token_are_gone_and_the_prompt_with_the_last(num_tokens):
    driver = Driver(make_engine())
    prompt, forks = make_choices(prompt=prompt_of(8), max_tokens=6, stop_token_ids=(5,), receives_kv=True)
    receiving(driver, prompt, forks)
    driver.engine.finish_receiving("a", num_tokens, None, dict.fromkeys(("a.0", "a.1", "a.2", "a.3"), 5))
    check_idle(driver.engine)
    assert driver.run().outputs == {}


def test_received_tokens_that_fit_nobody_are_refused():
    driver = Driver(make_engine())
    receiving(driver, *make_choices(prompt=prompt_of(8), seeds=(0, 1), receives_kv=True))
    receiving(driver, make_request("b", prompt_of(8, 1), receives_kv=True), [])
    for arguments, message in (
        (("a", 8, 5), "a has forks"),
        (("a", 8, None, {"a.0": 5}), r"no first token for a\.1, forks of a"),
        (("b", 8, None, {"b": 5}), "b has no forks"),
    ):
        with pytest.raises(ValueError, match=message):
            driver.engine.finish_receiving(*arguments)
    driver.engine.check_integrity()
    assert driver.engine.stats().num_receiving == 2

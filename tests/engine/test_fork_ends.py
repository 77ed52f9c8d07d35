"""Several choices of one prompt: each ends, is aborted or waits for a seat by itself."""

import numpy as np
import pytest

from engine.hash_executor import expected_tokens
from engine.sampling_params import FinishReason
from tests.engine.executors import VOCAB_SIZE
from tests.engine.forks import check, expected, names
from tests.engine.harness import Driver, check_idle, make_choices, make_engine, make_request, prompt_of

# --- ends


def test_forks_that_stop_at_their_first_token_end_and_the_others_go_on():
    prompt, forks = make_choices(prompt=prompt_of(6), seeds=(0, 1, 2), max_tokens=6)
    first = expected(forks[1])[0]
    prompt, forks = make_choices(prompt=prompt_of(6), seeds=(0, 1, 2), max_tokens=6, stop_token_ids=(first,))
    driver = Driver(make_engine())
    driver.add_choices(prompt, forks)
    result = driver.step()
    assert [output.finish_reason for output in result.outputs] == [None, FinishReason.STOP, None]
    assert result.outputs[1].matched_token_id == first
    driver.engine.check_integrity()
    assert driver.engine.stats().num_running == 2
    check(driver.run(), forks)


def test_nothing_is_left_when_all_forks_end_with_their_first_token():
    driver = Driver(make_engine())
    prompt, forks = make_choices(prompt=prompt_of(6), max_tokens=1)
    driver.add_choices(prompt, forks)
    driver.step()
    assert not driver.engine.has_work or not driver.step().outputs
    check(driver, forks)


@pytest.mark.parametrize("num_seats", [1, 2, 3])
def test_forks_without_a_seat_wait_with_their_first_token(num_seats):
    driver = Driver(make_engine(max_num_seqs=num_seats))
    prompt, forks = make_choices(prompt=prompt_of(6), max_tokens=6)
    later = make_request("later", prompt_of(5, 1))
    driver.add_choices(prompt, forks)
    driver.add(later)
    while not driver.outputs:
        driver.step()
    assert names(driver.results[-1])[:4] == ["a.0", "a.1", "a.2", "a.3"]
    assert driver.engine.stats().num_running == num_seats
    driver.engine.check_integrity()
    driver.run()
    assert driver.preempted == []
    assert driver.admitted == ["a", "later"]  # and "later" came after all forks: they had begun
    assert [o.finish_reason for o in driver.outputs["a.3"]][:-1] == [None] * 5
    assert driver.tokens("later") == expected(later)
    check(driver, forks)


def test_forks_end_with_their_first_tokens_when_the_prompt_is_prefilled_only():
    driver = Driver(make_engine(max_num_batched_tokens=8))
    prompt, forks = make_choices(prompt=prompt_of(10), seeds=(0, 1), prefill_only=True, logprobs=1)
    driver.add_choices(prompt, forks)
    driver.run()
    filled = [each for result in driver.results for each in result.filled]
    assert [(f.request_id, f.first, len(f.block_ids), f.num_tokens) for f in filled] == [
        ("a", 0, 2, 8),
        ("a", 2, 1, 10),
    ]
    for fork in forks:
        (output,) = driver.outputs[fork.request_id]
        assert (output.token.token_id, output.finish_reason) == (expected(fork)[0], FinishReason.LENGTH)
        assert output.token.logprob is not None
    for each in filled:
        driver.engine.unpin(each.block_ids)
    check_idle(driver.engine)


# --- abort


@pytest.mark.parametrize("num_steps", range(5))
def test_abort_takes_one_fork_away_and_the_others_go_on(num_steps):
    driver = Driver(make_engine(max_num_batched_tokens=8))
    prompt, forks = make_choices(prompt=prompt_of(14), max_tokens=5)
    driver.add_choices(prompt, forks)
    for _ in range(num_steps):
        driver.step()
    assert driver.engine.abort("a.1")
    assert not driver.engine.abort("a.1")
    driver.engine.check_integrity()
    driver.run()
    tokens = driver.tokens("a.1")
    assert tokens == expected(forks[1])[: len(tokens)]
    assert len(tokens) == max(0, num_steps - 1)
    check(driver, [forks[0], *forks[2:]])


@pytest.mark.parametrize("num_steps", range(2))
def test_abort_of_the_prompt_ends_the_forks_that_wait_for_it(num_steps):
    driver = Driver(make_engine(max_num_batched_tokens=8))
    driver.add_choices(*make_choices(prompt=prompt_of(14)))
    for _ in range(num_steps):
        driver.step()
    assert driver.engine.abort("a")
    assert not any(driver.engine.abort(name) for name in ("a", "a.0", "a.3"))
    check_idle(driver.engine)
    assert driver.run().outputs == {}


def test_prompt_without_forks_ends_without_output():
    driver = Driver(make_engine(max_num_batched_tokens=8))
    prompt, forks = make_choices(prompt=prompt_of(14), seeds=(0, 1))
    driver.add_choices(prompt, forks)
    driver.step()
    for fork in forks:
        assert driver.engine.abort(fork.request_id)
    driver.engine.check_integrity()
    assert driver.run().outputs == {}
    check_idle(driver.engine)


def test_the_last_of_the_forks_writes_in_place_when_the_others_are_gone():
    driver = Driver(make_engine())
    prompt, forks = make_choices(prompt=prompt_of(6), seeds=(0, 1))
    driver.add_choices(prompt, forks)
    driver.step()
    driver.engine.abort("a.0")
    driver.step()
    assert driver.engine.stats().num_active_blocks == 2
    check(driver.run(), forks[1:])


class Multiples:
    """Allows the multiples of a number."""

    has_given_up = False

    def __init__(self, number):
        self.number = number

    def allowed(self, output_token_ids):
        bits = np.packbits(np.arange(VOCAB_SIZE) % self.number == 0, bitorder="little")
        return np.pad(bits, (0, -len(bits) % 4)).view(np.uint32)


def test_each_fork_is_held_to_its_own_matcher_also_when_it_was_preempted():
    driver = Driver(make_engine(num_blocks=7, expected_growth_tokens=0))
    prompt, _ = make_choices(prompt=prompt_of(6), max_tokens=10)
    forks = [
        make_request(
            f"a.{n}", prompt_of(6), max_tokens=10, temperature=1.0, seed=n, matcher=Multiples(n) if n > 1 else None
        )
        for n in (1, 2, 3, 5)
    ]
    driver.add_choices(prompt, forks)
    driver.run()
    assert driver.preempted
    for number, fork in zip((1, 2, 3, 5), forks, strict=True):
        matcher = fork.sampling_input.matcher
        tokens = driver.tokens(fork.request_id)
        assert tokens == expected_tokens(fork.prompt_token_ids, fork.params, VOCAB_SIZE, matcher=matcher)
        assert all(token % number == 0 for token in tokens)
    check_idle(driver.engine)

"""Texts that their matcher gives up in the middle: they end at once, and not as if they were whole."""

import numpy as np
import pytest

from engine.sampling_params import FinishReason
from tests.engine.executors import VOCAB_SIZE
from tests.engine.harness import Driver, check_idle, make_choices, make_engine, make_request, prompt_of

END = 5


class GivesUp:
    """Allows everything but the end for some tokens, and then, for want of a better answer, the end alone."""

    def __init__(self, num_tokens):
        self.num_tokens = num_tokens
        self.has_given_up = False

    def allowed(self, output_token_ids):
        self.has_given_up = len(output_token_ids) >= self.num_tokens
        bits = np.packbits((np.arange(VOCAB_SIZE) == END) == self.has_given_up, bitorder="little")
        return np.pad(bits, (0, -len(bits) % 4)).view(np.uint32)


@pytest.mark.parametrize("stop_token_ids", [(), (END,)])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 7])
def test_a_text_that_is_given_up_is_aborted_whatever_else_would_end_it(num_tokens, stop_token_ids):
    driver = Driver(make_engine())
    given_up = make_request("a", prompt_of(6), max_tokens=8, stop_token_ids=stop_token_ids, matcher=GivesUp(num_tokens))
    beside = make_request("b", prompt_of(6), max_tokens=12)
    driver.add(given_up, beside)
    driver.run()
    assert [output.finish_reason for output in driver.outputs["a"]] == [None] * num_tokens + [FinishReason.ABORT]
    assert driver.outputs["a"][-1].matched_token_id is None
    assert driver.finish_reason("b") is FinishReason.LENGTH
    alone = Driver(make_engine())
    alone.add(make_request("b", prompt_of(6), max_tokens=12))
    assert driver.tokens("b") == alone.run().tokens("b")
    check_idle(driver.engine)


def test_a_fork_that_is_given_up_leaves_the_others():
    driver = Driver(make_engine())
    prompt, forks = make_choices(prompt=prompt_of(6), max_tokens=5)
    forks[1].hold_to(GivesUp(0))
    forks[2].hold_to(GivesUp(2))
    driver.add_choices(prompt, forks)
    driver.run()
    reasons = [driver.finish_reason(fork.request_id) for fork in forks]
    assert reasons == [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ABORT, FinishReason.LENGTH]
    assert [len(driver.tokens(fork.request_id)) for fork in forks] == [5, 1, 3, 5]
    check_idle(driver.engine)


def test_a_prefill_that_is_given_up_says_so():
    driver = Driver(make_engine())
    driver.add(make_request("a", prompt_of(6), prefill_only=True, matcher=GivesUp(0)))
    driver.run()
    assert driver.finish_reason("a") is FinishReason.ABORT

"""Log-probabilities of prompts: the same however the prompt is computed, on every executor.

(To the bit, where the logits are: see `test_embedded_model`.)
"""

import pytest

from engine.hash_executor import expected_prompt_logprobs
from tests.engine.executors import EXECUTORS, VOCAB_SIZE
from tests.engine.harness import Driver, check_idle, make_engine, make_request, prompt_of


@pytest.fixture(params=EXECUTORS)
def case(request):
    return EXECUTORS[request.param]


def told(driver, name):
    """What came with the first token, and with no other."""
    first, *rest = driver.outputs[name]
    assert all(output.prompt_logprobs is None for output in rest)
    return first.prompt_logprobs


def alone(case, prompt, **options):
    """Of a prompt computed at once, on an engine of its own."""
    driver = Driver(make_engine(case))
    driver.add(make_request("alone", prompt, prompt_logprobs=2, **options))
    return told(driver.run(), "alone")


def check_close(found, expected):
    """Equal, but for the last bits of float32; of chunks and of transformers they differ."""
    assert [token.token_id for token in found] == [token.token_id for token in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert len(ours.top) == len(theirs.top)
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 9, 17, 31])
def test_each_token_but_the_first_is_told_with_the_best_ones(case, length):
    prompt = prompt_of(length)
    found = alone(case, prompt)
    assert [token.token_id for token in found] == prompt[1:]
    assert all(len(token.top) == 2 for token in found)
    check_close(found, case.prompt_logprobs(prompt, make_request(prompt=prompt, prompt_logprobs=2).params))


def test_nothing_is_told_when_nothing_was_asked(case):
    driver = Driver(make_engine(case))
    driver.add(make_request("a", prompt_of(6), logprobs=1), make_request("b", prompt_of(6, 1), prompt_logprobs=0))
    driver.run()
    assert told(driver, "a") is None
    assert all(token.top == () and token.logprob < 0 for token in told(driver, "b"))


@pytest.mark.parametrize("budget", [1, 3, 4, 7, 16])
def test_chunks_of_a_prompt_tell_the_same(case, budget):
    driver = Driver(make_engine(case, max_num_batched_tokens=budget, max_num_seqs=1))
    driver.add(make_request("a", prompt_of(15), prompt_logprobs=2))
    check_close(told(driver.run(), "a"), alone(case, prompt_of(15)))
    assert driver.engine.stats().num_computed_tokens == 15 + 3


def test_a_cached_prompt_is_computed_again_and_tells_the_same(case):
    driver = Driver(make_engine(case))
    driver.add(make_request("before", prompt_of(15)))
    driver.run()
    driver.add(make_request("a", prompt_of(15), prompt_logprobs=2))
    check_close(told(driver.run(), "a"), alone(case, prompt_of(15)))
    assert {output.num_cached_tokens for output in driver.outputs["a"]} == {0}
    # Its blocks are cached as ever, and who asks for nothing finds them.
    driver.add(make_request("after", prompt_of(15)))
    assert driver.run().outputs["after"][0].num_cached_tokens == 12
    check_idle(driver.engine)


def test_batch_mates_change_nothing(case):
    driver = Driver(make_engine(case))
    driver.add(*(make_request(f"r{i}", prompt_of(5 + i, i), prompt_logprobs=2) for i in range(5)))
    driver.run()
    for i in range(5):
        check_close(told(driver, f"r{i}"), alone(case, prompt_of(5 + i, i)))


def test_preempted_request_computes_again_only_what_it_cannot_find(case):
    config = {"num_blocks": 11, "max_num_batched_tokens": 3, "max_num_seqs": 2, "expected_growth_tokens": 0}
    driver = Driver(make_engine(case, **config))
    driver.add(make_request("older", prompt_of(4, 1), max_tokens=22))
    driver.step()
    driver.add(make_request("a", prompt_of(29), max_tokens=3, prompt_logprobs=2))
    driver.run()
    assert driver.preempted == ["a"]
    check_close(told(driver, "a"), alone(case, prompt_of(29), max_tokens=3))
    # Known ones are found with their blocks: less is computed than from the beginning.
    assert driver.engine.stats().num_computed_tokens < 4 + 21 + 29 + 2 + 20
    assert driver.tokens("a") == case.expected(prompt_of(29), make_request(max_tokens=3).params, 64)
    check_idle(driver.engine)


def test_resumed_request_tells_them_with_its_next_token(case):
    whole = case.expected(prompt_of(6), make_request().params, 64)
    driver = Driver(make_engine(case, max_num_batched_tokens=4, max_num_seqs=1))
    driver.add(make_request("a", prompt_of(6), prompt_logprobs=2, resume_token_ids=whole[:2]))
    check_close(told(driver.run(), "a"), alone(case, prompt_of(6)))
    assert driver.tokens("a") == whole[2:]


# --- received


def receiving(driver, **options):
    driver.add(make_request("a", prompt_of(9), prompt_logprobs=1, receives_kv=True, **options))
    (target,) = driver.step().received_targets
    for position, token in enumerate(prompt_of(9)):
        (table,) = target.block_tables
        driver.engine.executor._pool[table[position // 4], position % 4] = ((position + 1) << 32) | token
    return target


def test_nothing_is_told_when_the_peer_has_told_it():
    driver = Driver(make_engine())
    receiving(driver)
    case = EXECUTORS["hash"]
    first, *rest = case.expected(prompt_of(9), make_request().params, 64)
    driver.engine.finish_receiving("a", 9, first)
    assert driver.run().tokens("a") == rest
    assert {output.prompt_logprobs for output in driver.outputs["a"]} == {None}
    assert driver.engine.stats().num_computed_tokens == 3


@pytest.mark.parametrize("num_tokens", [0, 8, 9])
def test_received_blocks_are_given_back_and_all_is_computed_here_when_the_peer_told_nothing(num_tokens):
    driver = Driver(make_engine())
    receiving(driver)
    driver.engine.commit_blocks("a", num_tokens // 4)
    assert driver.engine.finish_receiving("a", num_tokens, None) is None
    driver.engine.check_integrity()
    stats = driver.engine.stats()
    assert (stats.num_receiving, stats.num_waiting, stats.num_active_blocks) == (0, 1, 0)
    driver.run()
    params = make_request(prompt_logprobs=1).params
    assert told(driver, "a") == expected_prompt_logprobs(prompt_of(9), params, VOCAB_SIZE)
    assert driver.tokens("a") == EXECUTORS["hash"].expected(prompt_of(9), params, 64)
    assert driver.engine.stats().num_computed_tokens == 9 + 3
    assert driver.outputs["a"][0].is_first
    check_idle(driver.engine)


def test_receiving_request_finds_what_is_cached_since_its_peer_tells_the_rest():
    driver = Driver(make_engine())
    driver.add(make_request("before", prompt_of(9)))
    driver.run()
    assert receiving(driver).num_cached_blocks == 2
    driver.engine.finish_receiving("a", 8, None)  # but it told nothing
    driver.run()
    assert {output.num_cached_tokens for output in driver.outputs["a"]} == {0}
    check_idle(driver.engine)

"""The same request gives the same tokens, whatever happens to it (I6), on every executor."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.sampling_params import FinishReason
from tests.engine.executors import EXECUTORS, VOCAB_SIZE
from tests.engine.harness import (
    BLOCK_SIZE,
    Driver,
    check_idle,
    make_choices,
    make_engine,
    make_request,
    prompt_of,
)


@pytest.fixture(params=EXECUTORS)
def case(request):
    return EXECUTORS[request.param]


def expected(case, request, max_model_len=64):
    return case.expected(request.prompt_token_ids, request.params, max_model_len)


def check(case, driver, *requests):
    """All requests ended as they should, and nothing of them is left."""
    for request in requests:
        assert driver.tokens(request.request_id) == expected(case, request, driver.engine.config.max_model_len)
        assert driver.finish_reason(request.request_id) is not None
    check_idle(driver.engine)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 17])
def test_tokens_are_right_when_prompt_ends_around_a_block(case, length):
    driver = Driver(make_engine(case))
    request = make_request(prompt=prompt_of(length), max_tokens=10)
    driver.add(request)
    check(case, driver.run(), request)


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 8, 16])
def test_tokens_are_right_when_prompt_is_prefilled_in_chunks(case, budget):
    driver = Driver(make_engine(case, max_num_batched_tokens=budget, max_num_seqs=1))
    request = make_request(prompt=prompt_of(15))
    driver.add(request)
    check(case, driver.run(), request)


def test_tokens_are_right_when_many_run_at_once(case):
    driver = Driver(make_engine(case))
    requests = [make_request(f"r{i}", prompt_of(3 + i, i), max_tokens=6) for i in range(8)]
    driver.add(*requests)
    check(case, driver.run(), *requests)


def test_tokens_are_right_when_the_prefix_is_cached(case):
    driver = Driver(make_engine(case))
    for name, length, num_cached in [("cold", 12, 0), ("same", 12, 8), ("longer", 13, 12), ("shorter", 9, 8)]:
        request = make_request(name, prompt_of(length))
        driver.add(request)
        check(case, driver.run(), request)
        assert [output.num_cached_tokens for output in driver.outputs[name]] == [num_cached] * 4


def test_second_turn_hits_the_first_ones_answer_when_it_follows(case):
    driver = Driver(make_engine(case))
    first = make_request("first", prompt_of(10), max_tokens=11)
    driver.add(first)
    driver.run()
    second = make_request("second", [*first.prompt_token_ids, *driver.tokens("first"), 5])
    driver.add(second)
    check(case, driver.run(), first, second)
    assert driver.outputs["second"][0].num_cached_tokens == 20


def test_tokens_are_right_when_requests_are_preempted(case):
    driver = Driver(make_engine(case, num_blocks=8, expected_growth_tokens=0))
    requests = [make_request(f"r{i}", prompt_of(5, i), max_tokens=16) for i in range(4)]
    driver.add(*requests)
    check(case, driver.run(), *requests)
    assert driver.preempted
    assert driver.engine.stats().num_preemptions == len(driver.preempted)


def test_tokens_are_right_when_sampled_under_a_seed(case):
    driver = Driver(make_engine(case, num_blocks=8, expected_growth_tokens=0))
    requests = [make_request(f"r{i}", prompt_of(5), max_tokens=16, temperature=1.0, seed=i // 2) for i in range(4)]
    driver.add(*requests)
    check(case, driver.run(), *requests)
    assert driver.tokens("r0") == driver.tokens("r1") != driver.tokens("r2")


def test_stream_goes_on_identically_when_resumed_anywhere(case):
    whole = expected(case, make_request(prompt=prompt_of(6), max_tokens=9))
    driver = Driver(make_engine(case))
    for done in range(9):
        name = f"after {done}"
        request = make_request(name, prompt_of(6), max_tokens=9, resume_token_ids=whole[:done])
        driver.add(request)
        driver.run()
        assert driver.tokens(name) == whole[done:]
        assert [output.is_first for output in driver.outputs[name]] == [True] + [False] * (8 - done)
        assert all(output.num_cached_tokens <= 6 for output in driver.outputs[name])
    check_idle(driver.engine)


def test_forks_tokens_are_those_of_requests_alone(case):
    for num_blocks in (32, 8):  # side by side, or one at the cost of another
        driver = Driver(make_engine(case, num_blocks=num_blocks, expected_growth_tokens=0))
        prompt, forks = make_choices(prompt=prompt_of(6), seeds=(0, 1, 1, 2), max_tokens=12)
        driver.add_choices(prompt, forks)
        check(case, driver.run(), *forks)
        assert bool(driver.preempted) == (num_blocks == 8)
        assert driver.tokens("a.1") == driver.tokens("a.2") != driver.tokens("a.0")


def test_survivors_tokens_are_right_when_others_are_aborted(case):
    driver = Driver(make_engine(case, num_blocks=8, expected_growth_tokens=0))
    requests = [make_request(f"r{i}", prompt_of(5, i), max_tokens=12) for i in range(6)]
    driver.add(*requests)
    for aborted in ("r0", "r4", "r1"):  # running, waiting, perhaps preempted
        driver.step()
        assert driver.engine.abort(aborted)
        assert not driver.engine.abort(aborted)
        driver.engine.check_integrity()
    check(case, driver.run(), requests[2], requests[3], requests[5])
    assert len(driver.tokens("r0")) == 1


def test_request_ends_at_a_stop_token_when_it_is_sampled(case):
    tokens = expected(case, make_request(prompt=prompt_of(6), max_tokens=12))
    stop = tokens[5]
    request = make_request(prompt=prompt_of(6), max_tokens=12, stop_token_ids=(stop,))
    driver = Driver(make_engine(case))
    driver.add(request)
    driver.run()
    assert driver.tokens("a") == tokens[: tokens.index(stop) + 1]
    assert driver.finish_reason("a") is FinishReason.STOP
    assert driver.outputs["a"][-1].matched_token_id == stop


def test_request_ends_at_the_context_when_max_tokens_are_more(case):
    driver = Driver(make_engine(case, max_model_len=16))
    request = make_request(prompt=prompt_of(6), max_tokens=100)
    driver.add(request)
    check(case, driver.run(), request)
    assert len(driver.tokens("a")) == 10
    assert driver.finish_reason("a") is FinishReason.LENGTH
    assert driver.outputs["a"][-1].matched_token_id is None


@st.composite
def loads(draw):
    """A pool of two to eight blocks, and requests that each fit it; prompts from few tokens, so that they share.

    A request is (itself, its forks); it has an output if it has no forks.
    """
    num_blocks = draw(st.integers(2, 8))
    max_num_seqs = draw(st.integers(1, 5))
    config = {
        "num_blocks": num_blocks + 1,
        "max_model_len": draw(st.integers(2, num_blocks * BLOCK_SIZE + 1)),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + draw(st.integers(0, 8)),
        "expected_growth_tokens": draw(st.integers(0, 8)),
    }
    requests = []
    for index in range(draw(st.integers(1, 8))):
        length = draw(st.integers(1, config["max_model_len"] - 1))
        prompt, forks = make_choices(
            f"r{index}",
            [0] * (length - 1) + [draw(st.integers(0, 1))],
            draw(st.lists(st.integers(0, 3), max_size=4)),
            max_tokens=draw(st.integers(1, 20)),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            priority=draw(st.integers(-1, 1)),
            arrival_time=float(draw(st.integers(0, 3))),
            cache_salt=draw(st.sampled_from(["", "", "other"])),
            prompt_logprobs=draw(st.sampled_from([None, None, 1])),
            stop_token_ids=draw(st.sampled_from([(), tuple(range(0, VOCAB_SIZE, 4))])),
        )
        requests.append((prompt, forks))
    arrivals = [draw(st.integers(0, 20)) for _ in requests]
    names = [each.request_id for prompt, forks in requests for each in (prompt, *forks)]
    aborts = draw(st.dictionaries(st.sampled_from(names), st.integers(0, 40), max_size=4))
    return config, requests, arrivals, aborts


def check_prompt_logprobs(case, request, outputs):
    """They come with the first token, if they were asked for."""
    first, *rest = outputs
    assert {output.prompt_logprobs for output in rest} <= {None}
    if request.params.prompt_logprobs is None:
        assert first.prompt_logprobs is None
        return
    wanted = case.prompt_logprobs(request.prompt_token_ids, request.params)
    assert [token.token_id for token in first.prompt_logprobs] == [token.token_id for token in wanted]
    assert [token.logprob for token in first.prompt_logprobs] == pytest.approx(
        [token.logprob for token in wanted], abs=1e-4
    )


@pytest.mark.parametrize("name", EXECUTORS)
def test_every_request_ends_with_the_right_tokens_under_any_load(name):
    case = EXECUTORS[name]

    @settings(max_examples=case.max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(loads())
    def under(load):
        config, requests, arrivals, aborts = load
        driver = Driver(make_engine(case, **config))
        aborted = set()
        for step in range(41):
            for (prompt, forks), at in zip(requests, arrivals, strict=True):
                if at == step:
                    driver.add_choices(prompt, forks)
            for name, at in aborts.items():
                waiting = [fork.request_id for prompt, _ in requests for fork in prompt.forks or () if fork.prompt]
                if at == step and driver.engine.abort(name):
                    aborted.add(name)
                    aborted.update(fork for fork in waiting if fork.startswith(f"{name}."))
            driver.engine.check_integrity()
            driver.step()
        while driver.engine.has_work:
            driver.step()
            driver.engine.check_integrity()
        sequences = [sequence for prompt, forks in requests for sequence in forks or [prompt]]
        check(case, driver, *(each for each in sequences if each.request_id not in aborted))
        for sequence in sequences:
            whole = expected(case, sequence, driver.engine.config.max_model_len)
            tokens = driver.tokens(sequence.request_id)
            assert tokens == whole[: len(tokens)]
            if tokens:
                check_prompt_logprobs(case, sequence, driver.outputs[sequence.request_id])

    under()

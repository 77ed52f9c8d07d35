"""What tests of several choices of one prompt share: how their forks should go, and what the steps were."""

from engine.hash_executor import expected_tokens
from tests.engine.executors import VOCAB_SIZE
from tests.engine.harness import check_idle


def expected(request):
    return expected_tokens(request.prompt_token_ids, request.params, VOCAB_SIZE)


def check(driver, forks):
    """All forks ended as they should, and nothing of them is left."""
    for fork in forks:
        assert driver.tokens(fork.request_id) == expected(fork)
        assert [output.is_first for output in driver.outputs[fork.request_id]] == [True] + [False] * (
            len(expected(fork)) - 1
        )
        assert driver.finish_reason(fork.request_id) is not None
    check_idle(driver.engine)


def recorded(driver):
    """All steps from now on, as they are computed."""
    steps = []
    execute = driver.engine.executor.execute
    driver.engine.executor.execute = lambda step: steps.append(step) or execute(step)
    return steps


def names(result):
    return [output.request_id for output in result.outputs]

"""The thread around an engine: order, results, failures."""

import asyncio
import threading

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.hash_executor import HashExecutor, expected_tokens
from engine.memory import PrivateMemory
from engine.outputs import StepResult
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.stats import EngineStats
from gateway_end import PATIENCE_S
from worker.engine_thread import EngineThread


class Harness:
    def __init__(self) -> None:
        executor = HashExecutor()
        config = EngineConfig(num_blocks=32, max_model_len=256)
        memory = PrivateMemory(config.num_blocks * executor.layout.bytes_per_block)
        self.engine = Engine(config, executor, memory)
        self.tokens: list[int] = []
        self.failures: list[BaseException] = []
        self.heard = asyncio.Event()
        self.over = asyncio.Event()
        self.thread = EngineThread(self.engine, self.on_step, self.on_failure)

    def on_step(self, result: StepResult, stats: EngineStats) -> None:
        assert threading.current_thread() is threading.main_thread()
        for output in result.outputs:
            self.tokens.append(output.token.token_id)
            if output.finish_reason is not None:
                self.over.set()

    def on_failure(self, error: BaseException) -> None:
        self.failures.append(error)
        self.over.set()


@pytest.fixture
def params() -> SamplingParams:
    return SamplingParams(max_tokens=9, temperature=0.0)


async def test_posted_commands_run_in_order_and_steps_come_back_to_the_loop(params: SamplingParams) -> None:
    harness = Harness()
    order: list[int] = []
    harness.thread.start()
    for i in range(100):
        harness.thread.post(lambda engine, i=i: order.append(i))
    request = Request("r", [1, 2, 3], params, arrival_time=0.0)
    harness.thread.post(lambda engine: engine.add_request(request))
    async with asyncio.timeout(PATIENCE_S):
        await harness.over.wait()
    await harness.thread.stop()
    assert order == list(range(100))
    assert harness.tokens == expected_tokens([1, 2, 3], params, 1000)
    assert not harness.failures


async def test_what_was_posted_before_stop_still_runs_and_stop_may_come_twice() -> None:
    harness = Harness()
    done: list[str] = []
    harness.thread.start()
    harness.thread.post(lambda engine: done.append("last words"))
    await harness.thread.stop()
    await harness.thread.stop()
    assert done == ["last words"]


async def test_a_report_from_a_command_is_heard_after_the_steps_before_it(params: SamplingParams) -> None:
    harness = Harness()
    harness.thread.start()
    request = Request("r", [1, 2, 3], params, arrival_time=0.0)
    heard: list[int] = []
    harness.thread.post(lambda engine: engine.add_request(request))
    async with asyncio.timeout(PATIENCE_S):
        await harness.over.wait()
        harness.thread.post(lambda engine: harness.thread.report(lambda n: (heard.append(n), harness.heard.set()), 7))
        await harness.heard.wait()
    assert heard == [7]
    await harness.thread.stop()


async def test_an_engine_that_raises_is_reported_once_and_the_thread_ends(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness()

    def fail(step: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(harness.engine.executor, "execute", fail)
    harness.thread.start()
    request = Request("r", [1, 2, 3], params, arrival_time=0.0)
    harness.thread.post(lambda engine: engine.add_request(request))
    async with asyncio.timeout(PATIENCE_S):
        await harness.over.wait()
    await harness.thread.stop()
    assert [str(failure) for failure in harness.failures] == ["no more"]


async def test_stop_waits_for_what_is_answered_to_the_last_reports() -> None:
    """A report on its way to the loop is answered by a command, whose report is answered again."""
    harness = Harness()
    harness.thread.start()
    answers: list[int] = []

    def answer(rounds_left: int) -> None:
        answers.append(rounds_left)
        if rounds_left:
            harness.thread.post(lambda engine: harness.thread.report(answer, rounds_left - 1))

    harness.thread.post(lambda engine: harness.thread.report(answer, 5))
    await harness.thread.stop()
    assert answers == [5, 4, 3, 2, 1, 0]

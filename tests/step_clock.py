"""A worker's clock that only its engine moves: every step that computes takes one second."""

import pytest

from engine.executor import ModelOutput, SchedulerOutput
from engine.hash_executor import HashExecutor


class StepClock:
    """`time` is a worker's clock. The loop may hear of a step when the next one has begun: what it times is exact only
    where it begins with the step itself."""

    def __init__(self) -> None:
        self._now = 1000.0

    def time(self) -> float:
        return self._now

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes `HashExecutor` move it."""
        execute = HashExecutor.execute

        def execute_for_a_second(executor: HashExecutor, step: SchedulerOutput) -> ModelOutput:
            self._now += 1.0
            return execute(executor, step)

        monkeypatch.setattr(HashExecutor, "execute", execute_for_a_second)

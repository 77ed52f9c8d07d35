"""An engine whose steps are timed in two parts: what the executor takes, and all the rest."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.engine import Engine
from engine.executor import Executor, ModelOutput, SchedulerOutput
from engine.memory import KVLayout, PoolMemory, PrivateMemory
from engine.request import Request
from engine.sampling_params import SamplingParams


class TimedExecutor:
    """Another executor, and how long it has computed. Implements `Executor`."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.seconds = 0.0

    @property
    def vocab_size(self) -> int:
        return self._executor.vocab_size

    @property
    def layout(self) -> KVLayout:
        return self._executor.layout

    def bind(self, memory: PoolMemory, num_blocks: int) -> None:
        self._executor.bind(memory, num_blocks)

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        began = time.perf_counter()
        output = self._executor.execute(step)
        self.seconds += time.perf_counter() - began
        return output


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of some work."""

    executor: float
    rest: float


class Stepper:
    """An engine on private memory.

    The rest of a step includes the statistics that a worker's engine thread takes after each.
    """

    def __init__(self, executor: Executor, config: EngineConfig) -> None:
        self._executor = TimedExecutor(executor)
        self._memory = PrivateMemory(config.num_blocks * executor.layout.bytes_per_block)
        began = time.perf_counter()
        self.engine = Engine(config, self._executor, self._memory)
        self.construction_s = time.perf_counter() - began
        self._num_requests = 0

    def close(self) -> None:
        self._memory.close()

    def add(self, prompt_token_ids: Sequence[int], max_tokens: int) -> str:
        """Queues a greedy request; its id."""
        self._num_requests += 1
        request_id = str(self._num_requests)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.engine.add_request(Request(request_id, prompt_token_ids, params, arrival_time=time.monotonic()))
        return request_id

    def step(self) -> tuple[Took, list[str]]:
        """What it took, and who got a token."""
        began, computed = time.perf_counter(), self._executor.seconds
        result = self.engine.step(time.monotonic())
        self.engine.stats()
        executor_s = self._executor.seconds - computed
        took = Took(executor_s, time.perf_counter() - began - executor_s)
        return took, [output.request_id for output in result.outputs]

    def whole(self, prompt_token_ids: Sequence[int]) -> Took:
        """A request of one token, alone, from its coming to its end."""
        began, computed = time.perf_counter(), self._executor.seconds
        self.add(prompt_token_ids, 1)
        while self.engine.has_work:
            self.engine.step(time.monotonic())
            self.engine.stats()
        executor_s = self._executor.seconds - computed
        return Took(executor_s, time.perf_counter() - began - executor_s)

    def decode(self, prompts: Sequence[Sequence[int]], num_steps: int) -> list[Took]:
        """Each of `num_steps` steps in which all prompts' requests decode together; they are aborted then."""
        # Those that have begun go on while the others' prompts are computed: long enough for all.
        num_tokens = sum(map(len, prompts))
        max_tokens = num_steps + 2 + len(prompts) + num_tokens // self.engine.config.max_num_batched_tokens
        request_ids = {self.add(prompt, max_tokens) for prompt in prompts}
        waiting = set(request_ids)
        while waiting:
            waiting.difference_update(self.step()[1])
        times = []
        for _ in range(num_steps):
            took, got = self.step()
            assert set(got) == request_ids, f"{len(got)} of {len(request_ids)} requests were in the step"
            times.append(took)
        for request_id in request_ids:
            self.engine.abort(request_id)
        return times

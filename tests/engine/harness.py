"""Driving an engine in tests: small pools, a clock that ticks once a step, outputs by request."""

from engine.config import EngineConfig
from engine.engine import Engine
from engine.memory import PrivateMemory
from engine.outputs import RequestOutput, StepResult
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.engine.executors import EXECUTORS, VOCAB_SIZE, ExecutorCase

BLOCK_SIZE = 4


def make_engine(case: ExecutorCase = EXECUTORS["hash"], **config) -> Engine:
    """An engine of 31 usable blocks of four tokens, unless told otherwise."""
    defaults = {"num_blocks": 32, "max_model_len": 64, "block_size": BLOCK_SIZE, "max_num_seqs": 8}
    config = EngineConfig(**{**defaults, "max_num_batched_tokens": 32, "expected_growth_tokens": 4, **config})
    executor = case.make(config.block_size)
    return Engine(config, executor, PrivateMemory(config.num_blocks * executor.layout.bytes_per_block))


def make_request(name: str = "a", prompt=(1, 2, 3), **options) -> Request:
    """A greedy request for four tokens, unless told otherwise."""
    sampling = {"max_tokens": 4, "temperature": 0.0}
    for field in SamplingParams.__dataclass_fields__:
        if field in options:
            sampling[field] = options.pop(field)
    return Request(name, prompt, SamplingParams(**sampling), **{"arrival_time": 0.0, **options})


def make_choices(name: str = "a", prompt=(1, 2, 3), seeds=(0, 1, 2, 3), **options) -> tuple[Request, list[Request]]:
    """A prompt, and a fork of it for each seed: "a.0", "a.1", …; each samples four tokens, unless told otherwise."""
    options = {"temperature": 1.0, **options}
    own = {field: value for field, value in options.items() if field != "receives_kv"}
    forks = [make_request(f"{name}.{index}", prompt, seed=seed, **own) for index, seed in enumerate(seeds)]
    return make_request(name, prompt, **options), forks


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """Tokens that differ from another salt's from the first on."""
    return [(salt * 31 + position * 7 + 1) % VOCAB_SIZE for position in range(length)]


class Driver:
    """Steps an engine and remembers what came out."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now = 0.0
        self.results: list[StepResult] = []
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.preempted: list[str] = []
        self.admitted: list[str] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add_request(request)

    def add_choices(self, prompt: Request, forks: list[Request]) -> None:
        self.engine.add_request(prompt, forks)

    def step(self) -> StepResult:
        self.now += 1.0
        result = self.engine.step(self.now)
        self.results.append(result)
        for output in result.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self.preempted += result.preempted
        self.admitted += result.admitted
        return result

    def run(self, max_steps: int = 5000) -> "Driver":
        """Steps until the engine has nothing to do; every step must do something."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return self
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {self.engine.stats()}")

    def tokens(self, name: str) -> list[int]:
        """What the request got here."""
        return [output.token.token_id for output in self.outputs.get(name, [])]

    def finish_reason(self, name: str):
        return self.outputs[name][-1].finish_reason


def check_idle(engine: Engine) -> None:
    """Nothing is left behind: all blocks are free or cached, nobody waits."""
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_receiving, stats.num_pins) == (0, 0, 0, 0)
    assert stats.num_active_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == engine.config.num_blocks - 1

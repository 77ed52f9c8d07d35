"""A decode step of the embedded model against the requests in it, and against the tokens before it."""

import functools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.growth.stepper import Stepper, Took
from benchmarks.growth.verdict import Finding, constant, numbers, proportional
from benchmarks.measures import prompt
from benchmarks.paging.report import Column, Table
from engine.config import Dtype, EngineConfig
from engine.kvcache.slots import num_blocks_for

BLOCK_SIZE = 16
PROMPT_LEN = 128  # of each request in a batch
# Between two ends of a curve, from which on it is called growing: medians of so short times differ by a fifth.
CONSTANT = 1.3


@dataclass(frozen=True, slots=True)
class StepsConfig:
    """What is run. Lengths in tokens, both lists rising.

    Raises:
        ValueError: no step, no round or no thread.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    dtype: Dtype = "float32"
    threads: int = 1
    num_steps: int = 32
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("threads", "num_steps", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def engine(self) -> EngineConfig:
        # A context grows while its requests before it in the batch are computed.
        longest = max(self.contexts) + self.num_steps + 8
        in_batch = PROMPT_LEN + 2 * self.num_steps + 2 * max(self.batches)
        num_blocks = max(num_blocks_for(longest, BLOCK_SIZE), num_blocks_for(in_batch, BLOCK_SIZE) * max(self.batches))
        return EngineConfig(
            num_blocks=num_blocks + 2,
            max_model_len=max(longest, in_batch),
            block_size=BLOCK_SIZE,
            max_num_seqs=max(self.batches),
            expected_growth_tokens=0,
        )


@functools.cache
def model_stepper(config: StepsConfig) -> Stepper:
    """On the embedded model, which is loaded once."""
    from engine.model.locate import EMBEDDED_MODEL, resolve_model
    from engine.torch_executor import TorchExecutor

    path = resolve_model(EMBEDDED_MODEL)
    executor = TorchExecutor(path, dtype=config.dtype, block_size=BLOCK_SIZE, num_threads=config.threads)
    return Stepper(executor, config.engine)


def batch_finding(stepper: Stepper, config: StepsConfig) -> Finding:
    """Another request costs no more in a large batch than in a small one."""
    table = Table(
        "batch",
        f"A decode step against its requests ({config.dtype}, {config.threads} thread(s), prompts of {PROMPT_LEN})",
        [
            Column("requests", ","),
            Column("executor, ms", ",.2f"),
            Column("rest, µs", ",.0f"),
            Column("executor a request, ms", ",.2f"),
            Column("rest a request, µs", ",.1f"),
        ],
    )
    points = [(batch, [prompt(PROMPT_LEN, seed) for seed in range(batch)]) for batch in config.batches]
    for batch, took in _medians(stepper, config, points):
        executor_ms, rest_us = 1e3 * took.executor, 1e6 * took.rest
        table.add(batch, executor_ms, rest_us, executor_ms / batch, rest_us / batch)
    verdicts = [
        proportional(f"{part} by requests, upper part over all", config.batches, numbers(table, column), CONSTANT)
        for part, column in (("rest", "rest, µs"), ("executor", "executor, ms"))
    ]
    return Finding(table, verdicts)


def context_finding(stepper: Stepper, config: StepsConfig) -> Finding:
    """What attention reads grows with the context, nothing else does."""
    table = Table(
        "context",
        f"A decode step of one request against its context ({config.dtype}, {config.threads} thread(s))",
        [Column("tokens", ","), Column("executor, ms", ",.2f"), Column("rest, µs", ",.0f")],
    )
    # One prompt, ever longer: what was computed for the shorter one is found in the cache.
    for length, took in _medians(stepper, config, [(length, [prompt(length, 0)]) for length in config.contexts]):
        table.add(length, 1e3 * took.executor, 1e6 * took.rest)
    contexts, executor = config.contexts, numbers(table, "executor, ms")
    per_thousand = 1000 * (executor[-1] - executor[0]) / (contexts[-1] - contexts[0])
    table.notes.append(f"1,000 tokens more take {per_thousand:.2f} ms more")
    return Finding(
        table,
        [
            constant(f"rest, {contexts[-1]:,} tokens over {contexts[0]:,}", numbers(table, "rest, µs"), CONSTANT),
            proportional("executor by tokens of context, upper part over all", contexts, executor, CONSTANT),
        ],
    )


def _medians(
    stepper: Stepper, config: StepsConfig, points: Sequence[tuple[int, list[list[int]]]]
) -> Iterator[tuple[int, Took]]:
    """Each point's median step, over rounds in which all points come in turn; after one that warms up."""
    times: dict[int, list[Took]] = {size: [] for size, _ in points}
    for round_number in range(-1, config.rounds):
        for size, prompts in points:
            took = stepper.decode(prompts, config.num_steps if round_number >= 0 else 2)
            if round_number >= 0:
                times[size] += took
    for size, took in times.items():
        yield size, Took(statistics.median(t.executor for t in took), statistics.median(t.rest for t in took))

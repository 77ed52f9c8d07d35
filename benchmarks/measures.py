"""What is measured of an engine, ours or a peer's, by the same lines for both. Imports nothing of either.

Decode: tokens a second over all sequences of a batch, prompt 128 and output 128 tokens. Prefill: prompt tokens a
second. TTFT: from the request to its first token, of a prompt of 1,024 tokens; a hit finds all but its last block
cached. Every measurement begins with an empty cache.
"""

import time
from collections.abc import Callable
from typing import Protocol


class MeasuredEngine(Protocol):
    """An engine with the model loaded, one step at a time."""

    def add(self, num_prompt_tokens: int, max_tokens: int, seed: int) -> None:
        """A request with the `prompt` of that seed, which ends with its last token and not before."""
        ...

    def step(self) -> list[str]:
        """The requests that it gave a token."""
        ...

    def finish(self) -> int:
        """All requests to their ends; the number of tokens they still gave."""
        ...

    def clear(self) -> None:
        """Forgets all that is cached."""
        ...


Measure = Callable[[MeasuredEngine], float]


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Token ids, others for each seed."""
    return [1000 + (seed * 7919 + i * i * 31 + i) % 40_000 for i in range(num_tokens)]


def decode(batch: int) -> Measure:
    def measure(engine: MeasuredEngine) -> float:
        engine.clear()
        for seed in range(batch):
            engine.add(128, 128, seed)
        begun: set[str] = set()
        while len(begun) < batch:  # until every prompt is computed
            begun.update(engine.step())
        start = time.perf_counter()
        tokens = engine.finish()
        return tokens / (time.perf_counter() - start)

    return measure


def prefill(batch: int, length: int) -> Measure:
    def measure(engine: MeasuredEngine) -> float:
        engine.clear()
        start = time.perf_counter()
        for seed in range(batch):
            engine.add(length, 1, seed)
        engine.finish()
        return batch * length / (time.perf_counter() - start)

    return measure


def ttft(*, hit: bool) -> Measure:
    def measure(engine: MeasuredEngine) -> float:
        engine.clear()
        if hit:
            engine.add(1024, 1, seed=1)
            engine.finish()
        start = time.perf_counter()
        engine.add(1024, 1, seed=1)
        engine.finish()
        return 1000 * (time.perf_counter() - start)

    return measure


MEASURES: dict[str, tuple[str, Measure]] = {
    "decode, batch 1": ("tok/s", decode(1)),
    "decode, batch 8": ("tok/s", decode(8)),
    "decode, batch 32": ("tok/s", decode(32)),
    "prefill, 1 × 1,024": ("tok/s", prefill(1, 1024)),
    "prefill, 8 × 512": ("tok/s", prefill(8, 512)),
    "TTFT, 1,024 tokens, miss": ("ms", ttft(hit=False)),
    "TTFT, 1,024 tokens, hit": ("ms", ttft(hit=True)),
}

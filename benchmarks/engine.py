"""One engine on the embedded model, without any wire: what a worker can do at most.

    python -m benchmarks.engine [--dtype float32] [--threads 1] [--repeat 3] [--json FILE]

What is measured: `benchmarks.measures`; and how far decoding and prefill are from their matrix products alone. Medians
of `--repeat` runs, after one that warms up.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measures import MEASURES, prompt
from engine.config import EngineConfig
from engine.engine import Engine
from engine.memory import PrivateMemory
from engine.model.locate import EMBEDDED_MODEL, resolve_model
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.torch_executor import TorchExecutor

CHUNK = 512  # tokens computed in a step at most


class Bench:
    """Our engine. Implements `measures.MeasuredEngine`."""

    def __init__(self, dtype: str, threads: int) -> None:
        began = time.perf_counter()
        self.executor = executor = TorchExecutor(
            resolve_model(EMBEDDED_MODEL), dtype=dtype, block_size=16, num_threads=threads  # type: ignore[arg-type]
        )  # fmt: skip
        config = EngineConfig(num_blocks=1024, max_model_len=4096, max_num_batched_tokens=CHUNK)
        self._engine = Engine(config, executor, PrivateMemory(config.num_blocks * executor.layout.bytes_per_block))
        self._num_requests = 0
        self.ready_s = time.perf_counter() - began

    def floor_ms(self, num_tokens: int, num_sampling: int) -> float:
        """Of a step of so many tokens, some of which sample: its matrix products alone, one after the other."""
        model = self.executor.model
        linears = [linear for layer in model.layers for linear in layer.weights.linears]
        with torch.inference_mode():
            rows = [torch.randn(num_tokens, linear.in_features).to(model.embedding.dtype) for linear in linears]
            linears.append(model.lm_head)
            rows.append(rows[0][:num_sampling])
            start = time.perf_counter()
            for linear, x in zip(linears, rows, strict=True):
                linear(x)
            return 1000 * (time.perf_counter() - start)

    def add(self, num_prompt_tokens: int, max_tokens: int, seed: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self._num_requests += 1
        self._engine.add_request(
            Request(str(self._num_requests), prompt(num_prompt_tokens, seed), params, arrival_time=time.monotonic())
        )

    def step(self) -> list[str]:
        return [output.request_id for output in self._engine.step(time.monotonic()).outputs]

    def finish(self) -> int:
        tokens = 0
        while self._engine.has_work:
            tokens += len(self.step())
        return tokens

    def clear(self) -> None:
        self._engine.clear_cache()


OverFloor = Callable[[Bench, float], float]  # takes tokens a second as they were measured


def decode_over_floor(batch: int) -> OverFloor:
    def over_floor(bench: Bench, tokens_per_s: float) -> float:
        floor_ms = statistics.median(bench.floor_ms(batch, batch) for _ in range(9))
        return 1000 * batch / tokens_per_s / floor_ms

    return over_floor


def prefill_over_floor(bench: Bench, tokens_per_s: float) -> float:
    floor_ms = statistics.median(bench.floor_ms(CHUNK, 0) + bench.floor_ms(CHUNK, 1) for _ in range(3))
    return 1000 * 2 * CHUNK / tokens_per_s / floor_ms


# Time over that of the matrix products in it, which are measured just after.
OVER_FLOOR: dict[str, OverFloor] = {
    "decode, batch 1": decode_over_floor(1),
    "decode, batch 8": decode_over_floor(8),
    "decode, batch 32": decode_over_floor(32),
    "prefill, 1 × 1,024": prefill_over_floor,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    bench = Bench(arguments.dtype, arguments.threads)
    table = Table("", "median", "least", "most", "unit", title=f"{arguments.dtype}, {arguments.threads} thread(s)")
    results: dict[str, dict[str, object]] = {"ready": {"unit": "s", "median": bench.ready_s}}

    def add(name: str, unit: str, values: list[float]) -> None:
        results[name] = {"unit": unit, "median": statistics.median(values), "values": values}
        table.add_row(name, *(f"{v:,.4g}" for v in (statistics.median(values), min(values), max(values))), unit)

    for name, (unit, measure) in MEASURES.items():
        measure(bench)
        values = [measure(bench) for _ in range(arguments.repeat)]
        add(name, unit, values)
        if name in OVER_FLOOR:
            add(f"{name}: time / products", "×", [OVER_FLOOR[name](bench, value) for value in values])
    Console().print(table)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"dtype": arguments.dtype, "threads": arguments.threads, **results}, indent=1)
        )


if __name__ == "__main__":
    main()

"""One engine on the embedded model, without any wire: what a worker can do at most.

    python -m benchmarks.engine [--dtype float32] [--threads 1] [--repeat 3] [--json FILE]

What is measured: `benchmarks.measures`; and how far a decode step is from its matrix products alone. Medians of
`--repeat` runs, after one that warms up.
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

from benchmarks.measures import MEASURES, decode, prefill, prompt
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


def over_floor(batch: int) -> Callable[["Bench"], float]:
    """Time of a decode step over that of its matrix products, measured just before."""

    def measure(bench: Bench) -> float:
        floor_ms = statistics.median(bench.floor_ms(batch, batch) for _ in range(9))
        return 1000 * batch / decode(batch)(bench) / floor_ms

    return measure


def prefill_over_floor(bench: Bench) -> float:
    """Time of a prompt of 1,024 tokens over that of its matrix products, in the same two chunks."""
    floor_ms = bench.floor_ms(CHUNK, 0) + bench.floor_ms(CHUNK, 1)
    return 1000 * 2 * CHUNK / prefill(1, 2 * CHUNK)(bench) / floor_ms


OWN_MEASURES = {
    **MEASURES,
    "decode step / products, batch 1": ("×", over_floor(1)),
    "decode step / products, batch 8": ("×", over_floor(8)),
    "decode step / products, batch 32": ("×", over_floor(32)),
    "prefill / products, 1 × 1,024": ("×", prefill_over_floor),
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
    for name, (unit, measure) in OWN_MEASURES.items():
        measure(bench)
        values = [measure(bench) for _ in range(arguments.repeat)]
        results[name] = {"unit": unit, "median": statistics.median(values), "values": values}
        table.add_row(name, *(f"{v:,.4g}" for v in (statistics.median(values), min(values), max(values))), unit)
    Console().print(table)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"dtype": arguments.dtype, "threads": arguments.threads, **results}, indent=1)
        )


if __name__ == "__main__":
    main()

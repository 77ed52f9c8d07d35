"""What long prompts do to the streams that are running: apart and colocated, in one run, on the same two cores.

    python -m benchmarks.interference [--rounds 3] [--streams 4] [--prompts 6] [--rate 0.15] [--json FILE]

Each round starts both kinds of cluster in turn: one prefill and one decode worker with a thread each, and one worker
that does both with two threads. Streams decode while prompts of 1,000 tokens arrive (Poisson, open loop, an answer of
one token each). Shown: inter-token latency of the streams, time to first token of the prompts, tokens a second of the
streams; medians of the rounds, and the ratio of colocated to apart.
"""

import argparse
import asyncio
import json
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.served import served
from cluster.cli.api_client import ApiClient
from cluster.cli.load_report import LoadReport
from cluster.cli.open_loop import LoadConfig, run_load

MODES = {
    "apart": ["--prefill-workers", "1", "--decode-workers", "1", "--threads", "1"],
    "colocated": ["--prefill-workers", "0", "--decode-workers", "1", "--threads", "2"],
}
Figures = dict[str, float]


async def measure(base_url: str, arguments: argparse.Namespace, seed: int) -> Figures:
    streams = LoadConfig(arguments.streams, None, input_len=32, output_len=arguments.output_len, seed=seed)
    prompts = LoadConfig(arguments.prompts, arguments.rate, input_len=1000, output_len=1, seed=seed + 1000)
    async with ApiClient(base_url) as client:
        model = await client.model()
        loads = [run_load(client, model, config, lambda record: None) for config in (streams, prompts)]
        (of_streams, seconds), (of_prompts, _) = await asyncio.gather(*loads)
    running, arriving = LoadReport.of(of_streams, seconds), LoadReport.of(of_prompts, seconds)
    assert not running.failed + arriving.failed
    assert running.itl is not None
    assert arriving.ttft is not None
    return {
        "ITL p50, ms": 1000 * running.itl.p50,
        "ITL p99, ms": 1000 * running.itl.p99,
        "ITL max, ms": 1000 * running.itl.max,
        "TTFT of a 1,000-token prompt p50, ms": 1000 * arriving.ttft.p50,
        "streams, tokens/s": running.output_tokens / seconds,
    }


async def compare(arguments: argparse.Namespace) -> dict[str, list[Figures]]:
    results: dict[str, list[Figures]] = {mode: [] for mode in MODES}
    for seed in range(arguments.rounds):
        for mode, flags in MODES.items():
            async with served(*flags) as base_url:
                results[mode].append(await measure(base_url, arguments, seed))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--output-len", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--rate", type=float, default=0.15, help="prompts a second")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = asyncio.run(compare(arguments))
    table = Table("", *MODES, "colocated / apart")
    for name in results["apart"][0]:
        apart, colocated = (statistics.median(figures[name] for figures in results[mode]) for mode in MODES)
        table.add_row(name, f"{apart:,.0f}", f"{colocated:,.0f}", f"{colocated / apart:.2f}")
    Console().print(table)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

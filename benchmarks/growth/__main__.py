"""`python -m benchmarks.growth`: see the package."""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import growth
from benchmarks.arguments import whole_number, whole_numbers
from benchmarks.growth.directory import DirectoryConfig, directory_finding
from benchmarks.growth.pool import PoolConfig, pool_finding
from benchmarks.growth.steps import StepsConfig, batch_finding, context_finding, model_stepper
from benchmarks.growth.verdict import Finding
from benchmarks.pyplot import NoMatplotlib, load_pyplot


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    try:
        if options.plots:
            load_pyplot()  # before the work, not after it
        _measure(options)
    except (ValueError, OSError, NoMatplotlib) as error:
        sys.exit(str(error))


def _measure(options: argparse.Namespace) -> None:
    findings = []
    for section in options.sections:
        for finding in SECTIONS[section](options):
            findings.append(finding)
            Console().print(finding.noted().rendered())
            if options.plots:
                from benchmarks.growth.plots import plot

                print(plot(finding.table, options.plots))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(_as_json(findings, options), indent=1))


def _steps_config(options: argparse.Namespace) -> StepsConfig:
    return StepsConfig(
        batches=options.batches,
        contexts=options.contexts,
        dtype=options.dtype,
        threads=options.threads,
        num_steps=options.steps,
        rounds=options.rounds,
    )


def _batch(options: argparse.Namespace) -> Iterator[Finding]:
    config = _steps_config(options)
    yield batch_finding(model_stepper(config), config)


def _context(options: argparse.Namespace) -> Iterator[Finding]:
    config = _steps_config(options)
    yield context_finding(model_stepper(config), config)


def _pool(options: argparse.Namespace) -> Iterator[Finding]:
    yield pool_finding(PoolConfig(options.blocks, options.requests))


def _directory(options: argparse.Namespace) -> Iterator[Finding]:
    yield directory_finding(DirectoryConfig(options.blocks, options.requests))


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Finding]]] = {
    "batch": _batch,
    "context": _context,
    "pool": _pool,
    "directory": _directory,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=(growth.__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--sections", type=_sections, default=tuple(SECTIONS), help=",".join(SECTIONS))
    parser.add_argument("--batches", type=_sizes, default=(1, 2, 4, 8, 16, 32, 64), help="requests in a step")
    parser.add_argument(
        "--contexts", type=_sizes, default=(128, 256, 512, 1024, 2048, 4096, 8000), help="tokens before a step"
    )
    parser.add_argument("--blocks", type=_sizes, default=(1000, 10_000, 100_000, 1_000_000), help="of pools")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=whole_number(), default=1)
    parser.add_argument("--steps", type=whole_number(), default=32, help="timed of each batch and context, a round")
    parser.add_argument("--rounds", type=whole_number(), default=3)
    parser.add_argument(
        "--requests", type=whole_number(), default=200, help="timed on each pool, and look-ups of each directory"
    )
    parser.add_argument("--json", type=Path, help="where to write what the tables say")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="where to draw (needs matplotlib)")
    return parser


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"unknown section {name!r}; there are {', '.join(SECTIONS)}")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    sizes = whole_numbers(text)
    if len(sizes) < 3 or list(sizes) != sorted(set(sizes)):
        raise argparse.ArgumentTypeError(f"at least three rising sizes, not {text}")
    return sizes


def _as_json(findings: Sequence[Finding], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "machine": {"kernel": platform.release(), "python": platform.python_version()},
        "options": {name: value for name, value in vars(options).items() if name not in ("json", "plots")},
        "tables": {finding.table.name: finding.table.findings() for finding in findings},
        "verdicts": [
            {"section": finding.table.name, **asdict(verdict), "holds": verdict.holds}
            for finding in findings
            for verdict in finding.verdicts
        ],
    }


if __name__ == "__main__":
    main()

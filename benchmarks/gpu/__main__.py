"""Runs the sections, each in a process of its own, and prints one table. See the package."""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from benchmarks.gpu.section import Section, Setting

# Seconds that a section may take; all together stay below four minutes.
SECTIONS = {
    "kernels": 110.0,
    "ipc": 45.0,
    "handoff": 60.0,
    "graphs": 60.0,
    "speed": 90.0,
    "restarts": 70.0,
    "flashinfer": 120.0,
}
TOTAL_S = 235.0
# On a CPU nobody waits for figures, and others may be at work: limits are only for what hangs.
_CPU_PATIENCE = 5
_ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=sys.modules["benchmarks.gpu"].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="where to write what the table says")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which, separated by commas")
    parser.add_argument("--total-s", type=float, help=f"for all sections together (on a GPU {TOTAL_S:.0f})")
    parser.add_argument("--run", nargs=3, metavar=("SECTION", "FOLDER", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = "cuda:0" if arguments.device == "cuda" else "cpu"
    if arguments.run:
        _run_here(arguments.run[0], Setting(device, Path(arguments.run[1])), Path(arguments.run[2]))
        return
    names = arguments.sections.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"unknown section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    patience = 1 if arguments.device == "cuda" else _CPU_PATIENCE
    total_s = patience * TOTAL_S if arguments.total_s is None else arguments.total_s
    limits = {name: patience * SECTIONS[name] for name in names}
    sys.exit(_run_all(limits, arguments.device, arguments.json, total_s))


def _run_all(limits: dict[str, float], device: str, json_path: Path | None, total_s: float) -> int:
    if device == "cuda" and (reason := _why_no_gpu()) is not None:
        print(f"No GPU can be used here: {reason}. `--device cpu` runs the script itself on a CPU.")
        return 1
    began = time.monotonic()
    machine = _machine(device)
    print("\n".join(f"{key:12} {value}" for key, value in machine.items()), flush=True)
    sections = []
    for name, limit in limits.items():
        left = total_s - (time.monotonic() - began)
        sections.append(_run_apart(name, device, min(limit, left)))
        print(_table(sections[-1]), flush=True)
        if json_path is not None:
            findings = {"machine": machine, "sections": [section.findings() for section in sections]}
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps(findings, indent=1))
    broken = [f"{s.name}: {check.name}" for s in sections for check in s.checks if not check.holds]
    num_checks = sum(len(section.checks) for section in sections)
    took = time.monotonic() - began
    print(f"\n{num_checks - len(broken)} of {num_checks} checks hold; {took:.0f} s")
    print("\n".join(f"BROKEN  {name}" for name in broken))
    return 1 if broken or not num_checks else 0


def _why_no_gpu() -> str | None:
    """Asked in a process of its own, which also brings the libraries from the disk, on no section's time."""
    question = "import torch; torch.zeros(1, device='cuda')"
    asked = subprocess.run(
        [sys.executable, "-c", question], env=_environment(), capture_output=True, text=True, check=False
    )
    return _last_lines(asked.stderr, 1).removesuffix(".") if asked.returncode else None


def _run_apart(name: str, device: str, timeout_s: float) -> Section:
    """The section's findings; what it says last, if it fails."""
    section = Section(name)
    if timeout_s <= 0:
        section.check("ran", False, "no time was left")
        return section
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as folder:
        out = Path(folder) / "section.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--device", device, "--run", name, folder, str(out)]
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=timeout_s)
            ended = f"exit status {process.returncode}: {_last_lines(said)}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            # Its own children with it: they hold the GPU's memory.
            os.killpg(process.pid, 9)
            said, _ = process.communicate()
            ended = f"stopped after {timeout_s:.0f} s: {_last_lines(said)}"
        with suppress(OSError, ValueError):  # it has found nothing
            section = Section.read(out)
        if ended or not (section.checks or section.figures or section.notes):
            section.check("ran to its end", False, ended or "it found nothing")
        section.seconds = time.monotonic() - began
    return section


def _run_here(name: str, setting: Setting, out: Path) -> None:
    """In the section's own process."""
    importlib.import_module(f"benchmarks.gpu.{name}").run(Section(name, path=out), setting)


def _environment() -> dict[str, str]:
    paths = [str(_ROOT), str(_ROOT / "proto"), os.environ.get("PYTHONPATH", "")]
    # float32 is to be float32, whatever an image has made the default.
    exact = {"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}
    return {**os.environ, **exact, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _last_lines(text: str, count: int = 24) -> str:
    return "\n".join(text.strip().splitlines()[-count:])


# --- what it ran on


def _machine(device: str) -> dict[str, str]:
    versions = {
        name: _version(name) for name in ("torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "flashinfer-python")
    }
    facts = {
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }
    if device == "cuda":
        query = "--query-gpu=name,driver_version,memory.total,compute_cap"
        facts["GPU"] = _output("nvidia-smi", query, "--format=csv,noheader")
    return facts


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    try:
        run = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run.stdout.strip().replace("\n", "; ")


# --- the table


def _table(section: Section) -> str:
    lines = [f"\n── {section.name} ({section.seconds:.0f} s)"]
    lines += [f"  {'ok' if c.holds else 'BROKEN':8}{c.name:58} {c.detail}" for c in section.checks]
    lines += [f"  {'':8}{f.name:58} {f.value:,.4g} {f.unit}" for f in section.figures]
    lines += [f"  {'':8}{note}" for note in section.notes]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

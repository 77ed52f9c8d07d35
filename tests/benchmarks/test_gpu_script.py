"""`make test-gpu`, run on a CPU: the script itself, its sections and what it says of a broken one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_every_section_holds_on_a_cpu_and_is_written_as_json(tmp_path: Path) -> None:
    out = tmp_path / "findings" / "gpu.json"
    result = run_script("--device", "cpu", "--json", str(out))
    assert result.returncode == 0, result.stdout
    findings = json.loads(out.read_text())
    sections = {section["name"]: section for section in findings["sections"]}
    assert list(sections) == ["kernels", "ipc", "handoff", "graphs", "speed", "restarts", "flashinfer"]
    for name in ("kernels", "ipc", "handoff", "restarts"):
        assert sections[name]["checks"], name
        assert all(check["holds"] for check in sections[name]["checks"]), name
    figures = {figure["name"]: figure["value"] for figure in sections["speed"]["figures"]}
    assert all(value > 0 for value in figures.values())
    assert any(name.startswith("hand-off of 4096 tokens") for name in figures)
    assert findings["machine"]["commit"]
    assert "BROKEN" not in result.stdout


def test_without_a_gpu_one_sentence_says_so() -> None:
    result = run_script()
    assert result.returncode == 1
    assert result.stdout.startswith("No GPU can be used here: ")
    assert "CUDA" in result.stdout
    assert len(result.stdout.splitlines()) == 1


def test_a_section_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    result = run_script("--device", "cpu", "--sections", "speed,ipc", "--total-s", "0.2")
    assert result.returncode == 1
    assert "stopped after 0 s" in result.stdout
    assert "no time was left" in result.stdout


def test_an_unknown_section_is_refused() -> None:
    result = run_script("--sections", "speed,warp")
    assert result.returncode == 2
    assert (
        "unknown section 'warp'; there are kernels, ipc, handoff, graphs, speed, restarts, flashinfer" in result.stderr
    )

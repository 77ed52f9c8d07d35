"""Servers that benchmarks start: one that ends before it serves is said to have."""

import asyncio
import sys
from pathlib import Path

import pytest

from benchmarks import handoff
from benchmarks.serve import __main__ as serve
from benchmarks.served import served, served_by_vllm


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def tandem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `tandem` is looked for."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path / "tandem"


async def test_the_printed_url_is_the_servers_and_it_is_interrupted_at_the_end(tandem: Path) -> None:
    mark = tandem.with_name("interrupted")
    script(
        tandem, f"trap 'touch {mark}; exit 0' INT", "echo starting", "echo POST http://here:1/v1/chat/completions",
        "while :; do sleep 0.1; done",
    )  # fmt: skip
    async with served() as base_url:
        assert base_url == "http://here:1"
        assert not mark.exists()
    assert mark.exists()


async def test_a_server_that_ends_before_it_serves_is_not_waited_for(tandem: Path) -> None:
    script(tandem, "for i in $(seq 30); do echo line $i; done", "exit 3")
    with pytest.raises(RuntimeError) as caught:
        async with asyncio.timeout(60), served():
            pass
    first, *printed = str(caught.value).splitlines()
    assert first == "tandem serve did not start (exit status 3):"
    assert printed == [f"line {i}" for i in range(11, 31)]


async def test_a_vllm_that_ends_before_it_serves_is_not_waited_for(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "echo no such model >&2", "exit 4")
    with pytest.raises(RuntimeError, match=r"^vLLM did not start \(exit status 4\):\nno such model$"):
        async with asyncio.timeout(60), served_by_vllm(str(python), "model", cores=[0]):
            pass


def test_mains_say_it_in_a_sentence(tandem: Path, tmp_path: Path) -> None:
    script(tandem, "exit 3")
    for main, arguments in ((handoff.main, ["--rounds", "1"]), (serve.main, ["--ours=", "--rates", "1"])):
        with pytest.raises(SystemExit, match=r"^tandem serve did not start \(exit status 3\)$"):
            main([*arguments, "--json", str(tmp_path / "out.json")])

"""The block pool's benchmark: both sides do the work that is timed, and one that cannot is named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.blockpool import SideFailed, SideProcess, compare, medians
from benchmarks.blockpool_side import PHASES, Ours, run

ROOT = Path(__file__).parents[2]
SETUP = {"pool_blocks": 40, "num_blocks": 8, "block_size": 4, "events": False, "hash": "sha256"}

# As much of vLLM as the benchmark calls; what is called is written down.
STAND_IN = """
import sys, types
calls = []

class Pool:
    def __init__(self, num_blocks, caching, block_size, enable_kv_cache_events): assert caching
    def get_new_blocks(self, count): calls.append("allocate"); return list(range(count))
    def cache_full_blocks(self, request, blocks, cached, full, block_size, group):
        assert (cached, full, group) == (0, len(blocks), 0) and len(request.block_hashes) == full
        calls.append("register")
    def free_blocks(self, blocks): assert next(blocks) == 7; calls.append("free")
    def take_events(self): assert calls[-4:] == ["hash", "allocate", "register", "free"], calls

class Request:
    def __init__(self, name, tokens, params, pooling): self.block_hashes = []; self.tokens = tokens

def hasher(block_size, function):
    assert function == "sha256"
    def hash(request): calls.append("hash"); return request.tokens[::block_size]
    return hash

def module(name, **names): sys.modules[name] = types.SimpleNamespace(**names)

module("vllm.v1.core.kv_cache_utils", init_none_hash=lambda f: None, get_request_block_hasher=hasher)
module("vllm.v1.core.block_pool", BlockPool=Pool)
module("vllm.v1.request", Request=Request)
module("vllm.utils.hashing", get_hash_fn_by_name=lambda name: name)
for name in ("vllm.v1", "vllm.v1.core", "vllm.utils"): module(name, __path__=[])
class SamplingParams:
    def __init__(self, max_tokens): pass
"""


def test_our_side_hashes_registers_and_evicts() -> None:
    side = Ours(**{name: SETUP[name] for name in ("block_size", "events")}, num_blocks=41)
    seconds = run(side, seed=0, num_requests=9, num_blocks=8, block_size=4)
    assert {phase: len(values) for phase, values in seconds.items()} == dict.fromkeys(PHASES, 9)
    side.pool.check_integrity()
    assert side.pool.num_cached_blocks == 40
    assert not side.pool.has_events


def test_both_sides_are_measured_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with SideProcess("ours", sys.executable, SETUP) as ours, SideProcess("vllm", sys.executable, SETUP) as theirs:
        results = compare({"ours": ours, "vLLM's": theirs}, rounds=2, num_requests=3)
    assert list(results) == ["ours", "vLLM's"]
    for rounds in results.values():
        assert [set(one) for one in rounds] == [set(PHASES)] * 2
        assert medians(rounds)["all"] > 0


def test_a_peer_that_has_no_vllm_is_named() -> None:
    with pytest.raises(SideFailed, match="side 'vllm' ended: ModuleNotFoundError: No module named 'vllm"):
        SideProcess("vllm", sys.executable, SETUP)


def test_an_interpreter_that_is_not_there_is_said() -> None:
    with pytest.raises(FileNotFoundError, match="no-python"):
        SideProcess("vllm", "no-python", SETUP)


def test_medians_are_of_rounds_and_of_their_sums() -> None:
    rounds = [{phase: float(index) for phase in PHASES} for index in (5, 1, 3)]
    assert medians(rounds) == {**dict.fromkeys(PHASES, 3.0), "all": 15.0}


def test_ours_alone_is_printed_and_written(tmp_path: Path) -> None:
    out = tmp_path / "results" / "blockpool.json"
    arguments = ["--blocks", "8", "--pool-blocks", "40", "--requests", "2", "--json", str(out)]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.blockpool", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "allocate" in result.stdout
    assert len(json.loads(out.read_text())["rounds"]["ours"]) == 3

"""What starting costs: nobody loads a compiler who does not attend, and nothing is compiled twice."""

import subprocess
import sys

import pytest
import torch

from engine.attention import get_backend
from engine.attention.backend import AttentionShape


def _run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_naming_the_backends_loads_neither_torch_nor_numba() -> None:
    code = "import sys, engine.attention, engine.sampling; print([m for m in ('torch', 'numba') if m in sys.modules])"
    assert _run(code) == "[]"


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_second_start_compiles_nothing(num_threads: int) -> None:
    get_backend("cpu", num_threads=num_threads).prepare(
        AttentionShape(9, 3, 64, block_size=16, dtype=torch.float32, kv_dtype=torch.float32, scale=0.125)
    )
    # Another process, other sizes, views of a fused projection: types decide, and they are the same.
    code = f"""
import torch
from numba.core import event
from engine.attention import cpu_copies, get_backend
from engine.attention.backend import AttentionShape, build_metadata
from engine.executor import ScheduledRequest
with event.install_recorder("numba:compile") as compiled:
    backend = get_backend("cpu", num_threads={num_threads})
    shape = AttentionShape(4, 2, 32, 8, torch.float32, torch.float32, scale=1.0, windows=frozenset({{5}}))
    backend.prepare(shape)
    pool, fused = torch.zeros(999, 2, 2, 8, 32), torch.zeros(8, 8, 32)
    # One that threads share, and a chunk.
    long = ScheduledRequest("l", [0], 7000, (range(1, 900),), None)
    metadata = build_metadata([long, ScheduledRequest("r", [0] * 7, 3, ([4, 2],), None)], block_size=8)
    backend.plan(metadata)
    backend.write_kv(pool, fused[:, 4:6], fused[:, 6:])
    backend.attend(fused[:, :4], pool, window=None)
print(len(compiled.buffer), "compiled,", sum(cpu_copies.write_kv.stats.cache_hits.values()), "found")
"""
    assert _run(code) == "0 compiled, 1 found"

"""What starting costs: nobody loads a compiler who does not attend, and nothing is compiled twice."""

import subprocess
import sys

import pytest
import torch

from engine.attention import get_backend


def _run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_naming_the_backends_loads_neither_torch_nor_numba() -> None:
    code = "import sys, engine.attention, engine.sampling; print([m for m in ('torch', 'numba') if m in sys.modules])"
    assert _run(code) == "[]"


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_second_start_compiles_nothing(num_threads: int) -> None:
    get_backend("cpu", num_threads=num_threads).warm_up(
        dtype=torch.float32, num_heads=9, num_kv_heads=3, head_dim=64, block_size=16
    )
    # Another process, other sizes, views of a fused projection: types decide, and they are the same.
    code = f"""
import torch
from numba.core import event
from engine.attention import cpu_copies, get_backend
from engine.attention.backend import build_metadata
from engine.executor import ScheduledRequest
with event.install_recorder("numba:compile") as compiled:
    backend = get_backend("cpu", num_threads={num_threads})
    backend.warm_up(
        dtype=torch.float32, num_heads=4, num_kv_heads=2, head_dim=32, block_size=8, window=5
    )
    pool, fused = torch.zeros(9, 2, 2, 8, 32), torch.zeros(7, 8, 32)
    metadata = build_metadata([ScheduledRequest("r", [0] * 7, 3, ([4, 2],), None)], block_size=8)
    backend.write_kv(pool, fused[:, 4:6], fused[:, 6:], metadata.slot_mapping)
    backend.attend(fused[:, :4], pool, metadata, scale=1.0, window=None)
print(len(compiled.buffer), "compiled,", sum(cpu_copies.write_kv.stats.cache_hits.values()), "found")
"""
    assert _run(code) == "0 compiled, 1 found"

"""Triton kernels compile for the GPUs we serve on, into what was meant, and before serving: none is here to try."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
SMALLEST_SHARED_MEMORY = 99 * 1024  # of a program, on compute capability 8.6, 8.9 and 12.0
MATRIX_PRODUCT = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}  # of many rows
MODELS = {
    80: ["bfloat16:bfloat16:128:None", "bfloat16:float8_e4m3fn:128:1000"],
    90: ["bfloat16:bfloat16:128:1000", "bfloat16:float8_e4m3fn:128:1000", "float32:float32:128:None"],
    100: ["bfloat16:bfloat16:128:None", "bfloat16:float8_e4m3fn:64:None"],
    120: ["bfloat16:bfloat16:64:1000", "bfloat16:float8_e4m3fn:128:None"],
}


@pytest.mark.parametrize("capability", MODELS)
def test_preparing_compiles_every_kernel_into_what_fits_every_card(capability: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "tests/compile_triton.py", str(capability), *MODELS[capability]]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(compiled) == 4 * len(MODELS[capability])
    for facts in compiled:
        assert facts["shared"] <= SMALLEST_SHARED_MEMORY, facts
        assert facts["spilled"] == 0, facts
        kernel, model, instructions = facts["kernel"], facts["model"], facts["instructions"]
        if kernel not in ("prefill", "decode"):
            continue
        # Keys come from the pool past the registers, 16 bytes a thread.
        assert "cp.async.cg.shared.global" in instructions, facts
        if model.startswith("float32"):
            assert not {"tf32", *MATRIX_PRODUCT.values()} & set(instructions), facts
        else:
            # Of single queries there are too few for the newer ones.
            assert (MATRIX_PRODUCT[capability] if kernel == "prefill" else "mma.sync") in instructions, facts

"""Compiles the Triton backend's kernels for a GPU that is not here, as its own launches ask for them.

A process of its own: where triton is imported for tests, kernels are interpreted. For each model, named by
dtype:kv_dtype:head_dim:window, it prepares the backend, and prints a line of JSON for each kernel that this has
compiled; then it runs a step of other sizes, which compiles no more, or fails.

    python tests/compile_triton.py 90 bfloat16:bfloat16:128:None bfloat16:float8_e4m3fn:128:100
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from benchmarks.gpu.attention_case import Case, Step
from engine.attention import triton_backend
from engine.attention.triton_kernels import decode, prefill, write

RAGGED = ((0, 1), (700, 1), (15, 1), (0, 17), (256, 40))
# Products on tensor cores, by generation; copies of 16 bytes past the registers; what float32 must not become.
INSTRUCTIONS = ("mma.sync", "wgmma", "tcgen05.mma", "cp.async.cg.shared.global", "tf32")


class AbsentDriver:
    """All that compiling asks of a driver."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class CompiledOnly:
    """A kernel whose launches are compiled, and go nowhere."""

    def __init__(self, kernel: Any, compiled: dict[int, tuple[str, Any]]) -> None:
        self._kernel, self._compiled = kernel, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **constants: object) -> None:
            compiled = self._kernel.warmup(*arguments, grid=grid, **constants)
            self._compiled[id(compiled)] = self._kernel.__name__, compiled

        return launch


def main(capability: int, *models: str) -> None:
    driver.set_active(AbsentDriver(capability))
    target = triton_backend.Target(divmod(capability, 10), num_programs=100)
    triton_backend.Target.of = lambda device: target
    compiled: dict[int, tuple[str, Any]] = {}
    for module, name in ((write, "write_kv"), (prefill, "prefill"), (decode, "decode"), (decode, "combine")):
        setattr(module, name, CompiledOnly(getattr(module, name), compiled))
    for model in models:
        dtype, kv_dtype, head_dim, window = model.split(":")
        case = Case(
            model,
            RAGGED,
            num_heads=32,
            num_kv_heads=8,
            head_dim=int(head_dim),
            window=None if window == "None" else int(window),
            dtype=getattr(torch, dtype),
            kv_dtype=getattr(torch, kv_dtype),
        )
        backend = triton_backend.TritonBackend(device="cpu")
        compiled.clear()
        backend.prepare(case.shape)
        prepared = dict(compiled)
        for name, kernel in prepared.values():
            print(json.dumps({"model": model, "kernel": name, **facts(kernel)}))
        Step(case, "cpu").run(backend)
        assert compiled.keys() == prepared.keys(), f"{model}: {len(compiled) - len(prepared)} compiled while serving"


def facts(kernel: Any) -> dict[str, object]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        dump = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, _, value in (part.partition(":") for part in usage.split()) if value.isdigit()}
    return {
        "shared": kernel.metadata.shared,
        "registers": used["REG"],
        "spilled": used["STACK"],
        "instructions": [word for word in INSTRUCTIONS if word in kernel.asm["ptx"]],
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])

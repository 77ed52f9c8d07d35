"""Importing our modules costs no CUDA: a process that touched it before it knew its GPU would stay on GPU 0."""

import subprocess
import sys
from pathlib import Path

# Every module but those that are kernels; and what must not have been loaded by any, or touched in it.
CODE = """
import importlib, pkgutil, sys
for folder in ("engine", "kvtransfer", "worker", "prefill_worker", "decode_worker", "cluster", "benchmarks"):
    for module in pkgutil.walk_packages([folder], folder + "."):
        if not module.name.endswith("__main__") and "triton_kernels." not in module.name:
            importlib.import_module(module.name)
            print(module.name)
import torch
assert not torch.cuda.is_initialized(), "CUDA was touched"
loaded = [name for name in ("cupy", "cupy_backends", "flashinfer", "triton") if name in sys.modules]
assert not loaded, f"{loaded} were imported"
"""


def test_importing_every_module_loads_no_gpu_library_and_touches_no_cuda() -> None:
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", CODE], cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    imported = result.stdout.split()
    assert len(imported) > 150
    assert {"engine.torch_executor", "engine.cuda.runtime", "engine.cuda.graphs", "worker.build"} <= set(imported)

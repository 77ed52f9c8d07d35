"""Compiles our Triton kernels for a GPU that is not here, as a launch of the backend would, and says what came out.

A process of its own: where triton is imported for tests, kernels are interpreted. Prints a line of JSON a kernel.

    python tests/compile_triton.py 90 bfloat16:bfloat16:128 bfloat16:float8_e4m3fn:128
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention.triton_kernels import decode, prefill, write
from engine.attention.triton_plan import MAX_SPLITS
from engine.attention.triton_sizes import COMBINED_AT_ONCE, decode_tile, power_of_two, prefill_tile

TYPES = {"float32": "fp32", "bfloat16": "bf16", "float8_e4m3fn": "fp8e4nv", "uint8": "u8"}
NUM_KV_HEADS, GROUP = 8, 4
POINTERS_OF_WORDS = ("tiles", "tables", "splits", "query_start", "merges", "slots")


def main(capability: int, *models: str) -> None:
    for model in models:
        dtype, kv_dtype, head_dim = model.split(":")
        for name, kernel, constants, options in launches(capability, dtype, kv_dtype, int(head_dim)):
            # Bytes are written, and read where the GPU cannot convert them.
            bytes_wanted = kv_dtype == "float8_e4m3fn" and (name == "write_kv" or capability < 89)
            report(name, model, kernel, constants, options, capability, dtype, "uint8" if bytes_wanted else kv_dtype)


def launches(capability: int, dtype: str, kv_dtype: str, head_dim: int):
    itemsize, kv_itemsize = getattr(torch, dtype).itemsize, getattr(torch, kv_dtype).itemsize
    block_d = max(16, power_of_two(head_dim))
    layer = {"NUM_KV_HEADS": NUM_KV_HEADS, "BLOCK_SIZE": 16, "HEAD_DIM": head_dim, "BLOCK_D": block_d}
    queries = {"GROUP": GROUP, "UPCAST": False, **layer}
    tile = prefill_tile(block_d, GROUP, itemsize, unpacks_fp8=kv_itemsize == 1 and capability < 89)
    yield "prefill", prefill.prefill, {**queries, "HAS_WINDOW": True}, tile.options
    yield "decode", decode.decode, queries, decode_tile(block_d, GROUP, itemsize, kv_itemsize).options
    sizes = {"MAX_SPLITS": MAX_SPLITS, "BLOCK_S": COMBINED_AT_ONCE}
    heads = {"NUM_HEADS": NUM_KV_HEADS * GROUP, "HEAD_DIM": head_dim, "BLOCK_D": block_d}
    yield "combine", decode.combine, {**heads, **sizes}, {"enable_fp_fusion": True}
    yield "write_kv", write.write_kv, {**layer, "BLOCK_H": NUM_KV_HEADS}, {"enable_fp_fusion": True}


def report(name, model, kernel, constants, options, capability: int, dtype: str, kv_dtype: str) -> None:
    constants = {**constants, **{key: value for key, value in options.items() if key in kernel.arg_names}}
    options = {key: value for key, value in options.items() if key not in kernel.arg_names}
    signature, attributes = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        signature[argument] = kind = argument_type(argument, constants, dtype, kv_dtype)
        if kind.startswith("*") or argument.endswith("stride"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    by_place = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(kernel, signature, by_place, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        dump = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    facts = {key: int(value) for key, _, value in (part.partition(":") for part in usage.split()) if value.isdigit()}
    ptx = compiled.asm["ptx"]
    print(
        json.dumps({
            "kernel": name,
            "model": model,
            "shared": compiled.metadata.shared,
            "registers": facts["REG"],
            "spilled": facts["STACK"],
            "instructions": [word for word in INSTRUCTIONS if word in ptx],
        })
    )  # fmt: skip


# Products on tensor cores, by generation; copies of 16 bytes past the registers; what float32 must not become.
INSTRUCTIONS = ("mma.sync", "wgmma", "tcgen05.mma", "cp.async.cg.shared.global", "tf32")


def argument_type(name: str, constants: dict[str, object], dtype: str, kv_dtype: str) -> str:
    if name in constants:
        return "constexpr"
    if name in POINTERS_OF_WORDS:
        return "*i32"
    if name in ("partial_out", "partial_stats"):
        return "*fp32"
    if name.endswith("scale"):
        return "fp32"
    if name.endswith("stride") or name in ("block_rows", "window"):
        return "i32"
    return "*" + TYPES[{"q": dtype, "k": dtype, "v": dtype, "out": dtype, "kv": kv_dtype}[name]]


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])

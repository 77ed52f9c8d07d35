"""What this machine's CPU can do, as LLVM finds it. Imports nothing that is slow to import."""

from functools import cache


@cache
def has_feature(name: str) -> bool:
    """By LLVM's name of it: "avx512f", "avx512bf16", "amx-bf16"."""
    import llvmlite.binding

    try:
        return bool(llvmlite.binding.get_host_cpu_features().get(name))
    except RuntimeError:  # LLVM cannot tell on this platform
        return False


def multiplies_bfloat16() -> bool:
    """Whether it has instructions that multiply bfloat16; else every number is widened first, and nothing is won."""
    return has_feature("avx512bf16") or has_feature("amx-bf16")

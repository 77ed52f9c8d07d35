"""How fast blocks are copied from pool to pool, against one plain copy of as many bytes.

    python -m benchmarks.kv_copy [--blocks 63] [--bytes-per-block 737280]

The default is a prompt of 1,000 tokens of SmolLM2-135M in float32. "Cold" is the first use of a target block ever: the
kernel then finds and zeroes each of its pages, which takes far longer than the copy.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from engine.memory import KVLayout
from kvtransfer.copier import Blocks, copy_blocks
from kvtransfer.memfd import MemfdMapping, MemfdMemory

REPEATS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=63)
    parser.add_argument("--bytes-per-block", type=int, default=737_280)
    args = parser.parse_args()
    layout = KVLayout(16, args.bytes_per_block, bytes(16))
    nbytes = args.blocks * args.bytes_per_block
    in_a_row = list(range(args.blocks))
    # Every second block: no two are neighbours.
    apart = list(range(0, 2 * args.blocks, 2))
    pool_bytes = 2 * nbytes

    plain_source, plain_target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    owner, own = MemfdMemory(pool_bytes), MemfdMemory(pool_bytes)
    peer = MemfdMapping(owner.handle("owner", layout))
    source, target = blocks(peer.buffer, layout), blocks(own.buffer, layout)
    blocks(owner.buffer, layout)[:] = 1
    target[:] = 0

    print(f"{args.blocks} blocks, {nbytes / 1e6:.1f} MB")
    report("one plain copy", nbytes, lambda: np.copyto(plain_target, plain_source))
    report("pool to pool, one run", nbytes, lambda: copy_blocks(source, target, in_a_row, in_a_row))
    report("pool to pool, every block apart", nbytes, lambda: copy_blocks(source, target, apart, in_a_row))

    cold = iter([MemfdMemory(pool_bytes) for _ in range(REPEATS)])
    report(
        "pool to pool, cold target",
        nbytes,
        lambda: copy_blocks(source, blocks(next(cold).buffer, layout), in_a_row, in_a_row),
    )


def blocks(buffer: memoryview, layout: KVLayout) -> Blocks:
    """[num_blocks, bytes_per_block]"""
    return np.frombuffer(buffer, np.uint8).reshape(-1, layout.bytes_per_block)


def report(name: str, nbytes: int, copy: Callable[[], object]) -> None:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - began)
    best, median = min(seconds), statistics.median(seconds)
    print(f"{name:32} median {median * 1e3:7.2f} ms {nbytes / median / 1e9:6.2f} GB/s   best {best * 1e3:7.2f} ms")


if __name__ == "__main__":
    main()

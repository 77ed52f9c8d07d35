"""How the Triton kernels are cut: by types and head size, so that nothing is tuned while serving.

Three things bound the choice. Shared memory: all sizes fit into the 99 KiB of an SM of the smallest cards (compute
capability 8.6, 8.9, 12.0), and leave an A100 or H100 room for two or more programs. Registers: nothing spills that is
to be fast. And Triton's pipeline: keys are found through the block table, so each copy of keys waits for one of block
ids, and with s stages (s - 1) / 2 tiles of keys are under way.
"""

from dataclasses import dataclass

MAX_HEAD_DIM = 256
COMBINED_AT_ONCE = 16  # splits
# Of decode. What an SM does not hold at once waits its turn; there is a list of work, so none comes too late.
PROGRAMS_PER_SM = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """Of one kernel."""

    block_m: int  # rows: queries × heads of a group
    block_n: int  # keys
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int | bool]:
        """Of a launch. Fused multiply-adds are asked for by name, as Triton's default is about to change."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


def prefill_tile(block_d: int, group_size: int, itemsize: int, *, unpacks_fp8: bool = False) -> Tile:
    """Many rows share each tile of keys.

    Args:
        block_d: the head size, padded to a power of two.
        itemsize: bytes of an element of a query. Products of float32 use no tensor core: their operands are registers.
        unpacks_fp8: 8-bit keys are converted by arithmetic, which costs registers too.
    """
    if itemsize == 4:
        tile = Tile(32 if block_d <= 64 else 16, 16 if unpacks_fp8 or block_d > 128 else 32, 8, 2)
    elif block_d <= 128:
        tile = Tile(128, 32 if unpacks_fp8 else 64, 8, 3)
    else:
        tile = Tile(64, 16 if unpacks_fp8 else 32, 8, 3)
    return Tile(max(tile.block_m, power_of_two(group_size)), tile.block_n, tile.num_warps, tile.num_stages)


def decode_tile(block_d: int, group_size: int, itemsize: int, kv_itemsize: int) -> Tile:
    """Bound by memory: as few rows as products allow, and 8 KiB of keys a tile, of which two are under way."""
    block_m = max(16, power_of_two(group_size))
    if itemsize == 4:
        return Tile(block_m, max(16, 2048 // block_d), 4 if block_d <= 128 else 8, 3)
    return Tile(block_m, min(64, max(16, 8192 // (block_d * kv_itemsize))), 4, 5)


def power_of_two(n: int) -> int:
    """The smallest that is at least n."""
    return 1 << (n - 1).bit_length()

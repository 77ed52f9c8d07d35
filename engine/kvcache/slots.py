"""From a token's position to its place in memory: the arithmetic of paged KV, as pure functions."""

from collections.abc import Sequence


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens, the last one perhaps in part."""
    return -(-num_tokens // block_size)


def locate(position: int, block_table: Sequence[int], block_size: int) -> tuple[int, int]:
    """(block id, slot in that block) of the token at `position`."""
    return block_table[position // block_size], position % block_size


def slot_index(position: int, block_table: Sequence[int], block_size: int) -> int:
    """The token's slot counted through the whole pool: block_id · block_size + position % block_size."""
    block_id, slot = locate(position, block_table, block_size)
    return block_id * block_size + slot


def slot_mapping(first: int, num_tokens: int, block_table: Sequence[int], block_size: int) -> list[int]:
    """`slot_index` of `num_tokens` consecutive positions from `first` on."""
    return [slot_index(position, block_table, block_size) for position in range(first, first + num_tokens)]


def pool_offset(
    block_id: int,
    layer: int,
    kv: int,
    head: int,
    slot: int,
    *,
    num_layers: int,
    num_heads: int,
    block_size: int,
    head_dim: int,
) -> int:
    """Elements before one token's vector in `pool[num_blocks, num_layers, 2, num_heads, block_size, head_dim]`.

    Args:
        kv: 0 for K, 1 for V.
    """
    return ((((block_id * num_layers + layer) * 2 + kv) * num_heads + head) * block_size + slot) * head_dim


def split_k_offset(
    block_id: int, head: int, slot: int, dim: int = 0, *, num_heads: int, head_dim: int, block_size: int, x: int
) -> int:
    """Elements before K's element `dim` in the x-split layout `[num_blocks, num_heads, head_dim/x, block_size, x]`.

    The layout of vLLM's own PagedAttention kernels: x elements (16 bytes) of one token lie together, so that the
    threads of a warp, one a token, read neighbouring memory.
    """
    return (((block_id * num_heads + head) * (head_dim // x) + dim // x) * block_size + slot) * x + dim % x

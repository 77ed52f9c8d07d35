"""How much of a GPU's memory a block pool may take."""

from engine.model.config import ModelConfig

# Of the logits of a row: float32, a graph's copy of them, and what sampling makes (float64 weights, a sort with its
# indices, sums).
_BYTES_PER_LOGIT = 4 + 4 + 5 * 8


def num_blocks_that_fit(
    *, total: int, free: int, taken: int, activations: int, utilization: float, bytes_per_block: int
) -> int:
    """Blocks, at least 0, for which this process stays within its share of the GPU.

    What is beyond the share (CUDA's own context, libraries' workspaces, graphs) is for what cannot be foreseen, and for
    others on the same GPU: two workers that share one have half the share each.

    Args:
        total, free: bytes of the GPU, now.
        taken: bytes that this process has taken for weights.
        activations: bytes that a step will take, see `activation_bytes`.
        utilization: this process's share of `total`, weights and all.
    """
    wanted = int(total * utilization) - taken - activations
    return max(0, min(wanted, free - activations) // bytes_per_block)


def activation_bytes(config: ModelConfig, *, max_num_batched_tokens: int, max_num_seqs: int, item_bytes: int) -> int:
    """An upper estimate of what the largest step holds beside weights and pool, in bytes.

    A layer's widest moment, twice over since an operation's input and output live together, in float32 where norms and
    rotations compute in it; and the logits.
    """
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = (2 * heads + 3 * config.intermediate_size + 4 * config.hidden_size) * max(item_bytes, 4)
    return 2 * max_num_batched_tokens * per_token + max_num_seqs * config.vocab_size * _BYTES_PER_LOGIT

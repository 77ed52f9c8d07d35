"""A decoder of the Llama family: from tokens and the block pool to logits.

A step is one flat batch of tokens, [num_tokens, hidden_size], of any number of requests, prompts and decodes mixed;
only attention knows which token belongs to whom. Every layer writes its keys and values into the pool and adds to the
residual stream twice; at the end, only the rows that sample are multiplied with the vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionBackend
from engine.model.config import ModelConfig
from engine.model.decoder_layer import DecoderLayer
from engine.model.linear import Linear, TiledLinear
from engine.model.norm import RMSNorm
from engine.model.rope import RotaryEmbedding


class Residual(NamedTuple):
    """The residual stream behind the last layer, whose own share is not added yet; both [num_tokens, hidden_size]."""

    hidden: torch.Tensor
    delta: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Llama:
    """The whole model, in inference only."""

    config: ModelConfig
    embedding: torch.Tensor  # [vocab_size, hidden_size]
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    lm_head: Linear  # to float32
    rope: RotaryEmbedding

    @property
    def linears(self) -> list[Linear]:
        return [*(linear for layer in self.layers for linear in layer.weights.linears), self.lm_head]

    def warm_up(self) -> None:
        """Compiles, or loads from disk, what a step runs besides attention: before the first request, not in it."""
        layer = self.layers[0]  # what it runs, all do
        hidden = self.embedding.new_zeros(1, self.config.hidden_size)
        cos_sin = self.rope.cos_sin(torch.zeros(1, dtype=torch.int64, device=hidden.device))
        q, _, _ = layer.before_attention(hidden, torch.zeros_like(hidden), *cos_sin)
        self.lm_head(self.norm.after_adding(hidden, layer.after_attention(hidden, q)))
        for linear in (*layer.weights.linears, self.lm_head):
            if isinstance(linear, TiledLinear):
                linear.warm_up(hidden.dtype)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        layer_kvs: list[torch.Tensor],
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Computes a step: fills the KV slots of its tokens, returns the logits of some.

        Args:
            logit_rows: [num_rows] int64, rows of the batch whose logits are wanted.

        Returns:
            [num_rows, vocab_size] float32.
        """
        return self.logits(self.residual(token_ids, positions, attention, layer_kvs), logit_rows)

    def residual(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        layer_kvs: list[torch.Tensor],
    ) -> Residual:
        """Computes a step up to what its logits are made of: fills the KV slots of its tokens.

        Args:
            token_ids, positions: [num_tokens] int64.
            attention: planned for this step.
            layer_kvs: a layer: its view of the pool, [num_blocks, 2, num_kv_heads, block_size, head_dim].
        """
        hidden = F.embedding(token_ids, self.embedding)
        delta = torch.zeros_like(hidden)
        cos, sin = self.rope.cos_sin(positions)
        for layer, layer_kv in zip(self.layers, layer_kvs, strict=True):
            q, k, v = layer.before_attention(hidden, delta, cos, sin)
            attention.write_kv(layer_kv, k, v, scales=layer.kv_scales)
            attended = attention.attend(q, layer_kv, window=layer.window, scales=layer.kv_scales)
            delta = layer.after_attention(hidden, attended)
        return Residual(hidden, delta)

    def logits(self, residual: Residual, rows: torch.Tensor) -> torch.Tensor:
        """The logits of some rows of a step: for a chunk in the middle of a prompt it is none.

        Args:
            rows: [num_rows] int64.

        Returns:
            [num_rows, vocab_size] float32.
        """
        if len(rows) == 0:
            return residual.hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        return self.lm_head(self.norm.after_adding(residual.hidden[rows], residual.delta[rows]))

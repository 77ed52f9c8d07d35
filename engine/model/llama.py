"""A decoder of the Llama family: from tokens and the block pool to logits.

A step is one flat batch of tokens, [num_tokens, hidden_size], of any number of requests, prompts and decodes mixed;
only attention knows which token belongs to whom. Every layer writes its keys and values into the pool and adds to the
residual stream twice; at the end, only the rows that sample are multiplied with the vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionBackend, KVScales
from engine.model.config import ModelConfig
from engine.model.linear import Linear
from engine.model.rope import RotaryEmbedding, rotate


class RMSNorm:
    """x / √(mean(x²) + eps) · weight, over the last dimension; the mean in float32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:  # one kernel instead of eight
            return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
        wide = x.to(torch.float32)
        scale = (wide * wide).mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self._weight)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The weights of a layer; those of q, k and v, and of gate and up, lie one below the other in one matrix."""

    input_norm: RMSNorm
    qkv: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o: Linear
    post_attention_norm: RMSNorm
    gate_up: Linear
    down: Linear
    window: int | None
    kv_scales: KVScales


@dataclass(frozen=True, slots=True, eq=False)
class Llama:
    """The whole model, in inference only."""

    config: ModelConfig
    embedding: torch.Tensor  # [vocab_size, hidden_size]
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    lm_head: Linear
    rope: RotaryEmbedding

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
            token_ids, positions: [num_tokens] int64.
            attention: planned for this step.
            layer_kvs: a layer: its view of the pool, [num_blocks, 2, num_kv_heads, block_size, head_dim].
            logit_rows: [num_rows] int64, rows of the batch whose logits are wanted.

        Returns:
            [num_rows, vocab_size] float32.
        """
        hidden = F.embedding(token_ids, self.embedding)
        cos_sin = self.rope.cos_sin(positions)
        for layer, layer_kv in zip(self.layers, layer_kvs, strict=True):
            hidden += self._attend(layer, layer.input_norm(hidden), cos_sin, attention, layer_kv)
            gate, up = layer.gate_up(layer.post_attention_norm(hidden)).chunk(2, dim=-1)
            hidden += layer.down(F.silu(gate).mul_(up))
        if len(logit_rows) == 0:
            return hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        return self.lm_head(self.norm(hidden[logit_rows])).to(torch.float32)

    def _attend(
        self,
        layer: DecoderLayer,
        x: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        attention: AttentionBackend,
        layer_kv: torch.Tensor,
    ) -> torch.Tensor:
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        heads = layer.qkv(x).view(len(x), num_heads + 2 * num_kv_heads, self.config.head_dim)
        v = heads[:, num_heads + num_kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
            qk = torch.cat((layer.q_norm(q), layer.k_norm(k)), dim=1)
        else:
            qk = heads[:, : num_heads + num_kv_heads]
        qk = rotate(qk, *cos_sin)  # both at once: a head is a head
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        attention.write_kv(layer_kv, k, v, scales=layer.kv_scales)
        attended = attention.attend(q, layer_kv, window=layer.window, scales=layer.kv_scales)
        return layer.o(attended.reshape(len(x), -1))

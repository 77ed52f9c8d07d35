"""A decoder of the Llama family: from tokens and the block pool to logits.

A step is one flat batch of tokens, [num_tokens, hidden_size], of any number of requests, prompts and decodes mixed;
only attention knows which token belongs to whom. Every layer writes its keys and values into the pool and adds to the
residual stream twice; at the end, only the rows that sample are multiplied with the vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionBackend, KVScales
from engine.cpu_code import as_numpy
from engine.model import cpu_layer
from engine.model.config import ModelConfig
from engine.model.linear import Linear
from engine.model.rope import RotaryEmbedding, rotate


class RMSNorm:
    """x / √(mean(x²) + eps) · weight, over the last dimension; the mean in float32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._cpu_weight = as_numpy(weight) if weight.is_cpu else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._cpu_weight is None:
            return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, out_rows = (as_numpy(tensor.view(-1, x.shape[-1])) for tensor in (x, out))
        cpu_layer.rms_norm(rows, self._cpu_weight, np.float32(self._eps), out_rows)
        return out

    def after_adding(self, hidden: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """hidden += delta, in place; the norm of what comes out. Both [num_tokens, hidden_size], contiguous."""
        if self._cpu_weight is None:
            hidden += delta
            return self(hidden)
        out = torch.empty_like(hidden)
        arrays = (as_numpy(hidden), as_numpy(delta), self._cpu_weight, np.float32(self._eps), as_numpy(out))
        cpu_layer.add_rms_norm(*arrays)
        return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up: [num_tokens, 2 * intermediate_size], gates first -> [num_tokens, intermediate_size]."""
    if not gate_up.is_cpu:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    cpu_layer.silu_and_mul(as_numpy(gate_up), as_numpy(out))
    return out


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

    def warm_up(self) -> None:
        """Compiles, or loads from disk, what runs between the matrix products: before the first request, not in it."""
        x = self.embedding.new_zeros(1, self.config.hidden_size)
        self.norm.after_adding(x, self.norm(x))
        positions = torch.zeros(1, dtype=torch.int64, device=x.device)
        rotate(x.new_zeros(1, 1, self.config.head_dim), 1, *self.rope.cos_sin(positions))
        silu_and_mul(self.lm_head(x)[:, :2].contiguous())

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
        delta: torch.Tensor | None = None  # of the layer before: not added to the residual stream yet
        for layer, layer_kv in zip(self.layers, layer_kvs, strict=True):
            x = layer.input_norm(hidden) if delta is None else layer.input_norm.after_adding(hidden, delta)
            attended = self._attend(layer, x, cos_sin, attention, layer_kv)
            x = layer.post_attention_norm.after_adding(hidden, attended)
            delta = layer.down(silu_and_mul(layer.gate_up(x)))
        assert delta is not None, "a model without layers"
        if len(logit_rows) == 0:
            return hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        # Only of these rows: for a chunk in the middle of a prompt it is none.
        last = self.norm.after_adding(hidden[logit_rows], delta[logit_rows])
        return self.lm_head(last).to(torch.float32)

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
            heads = torch.cat((layer.q_norm(q), layer.k_norm(k)), dim=1)
        qk = rotate(heads, num_heads + num_kv_heads, *cos_sin)  # both at once: a head is a head
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        attention.write_kv(layer_kv, k, v, scales=layer.kv_scales)
        attended = attention.attend(q, layer_kv, window=layer.window, scales=layer.kv_scales)
        return layer.o(attended.reshape(len(x), -1))

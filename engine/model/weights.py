"""Builds a `Llama` out of a checkpoint, tensor by tensor: what is beside the model never exceeds one fused matrix."""

import math
from pathlib import Path

import torch

from engine.attention.backend import KVScales
from engine.model.config import ModelConfig
from engine.model.cpu_decoder_layer import FusedLayer
from engine.model.decoder_layer import DecoderLayer, LayerWeights, PlainLayer
from engine.model.errors import ModelLoadError
from engine.model.linear import Linear, make_linear
from engine.model.llama import Llama
from engine.model.norm import RMSNorm
from engine.model.rope import RotaryEmbedding
from engine.model.tensor_source import ROPE_FACTORS, TensorSource, open_source


def load_llama(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    with_kv_scales: bool = False,
) -> Llama:
    """Reads the weights of the model at `path`, whose description is `config`, onto `device`.

    Args:
        with_kv_scales: take the scales of an 8-bit KV cache, if there are any; else they are 1.

    Raises:
        ModelLoadError: a file or tensor is missing, damaged, misshapen or of a type that is not supported.
    """
    with torch.inference_mode(), open_source(path, config) as source:
        model = _Builder(config, source, dtype, torch.device(device), with_kv_scales).model()
        model.warm_up()
        return model


class _Builder:
    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        with_kv_scales: bool,
    ) -> None:
        self._config = config
        self._source = source
        self._dtype = dtype
        self._device = device
        self._with_kv_scales = with_kv_scales

    def model(self) -> Llama:
        config = self._config
        embedding = self._empty(config.vocab_size, config.hidden_size)
        self._source.copy_into("model.embed_tokens.weight", embedding)
        factors = None
        if ROPE_FACTORS in self._source:
            factors = torch.empty(config.head_dim // 2)  # the frequencies are worked out on the CPU
            self._source.copy_into(ROPE_FACTORS, factors)
        return Llama(
            config=config,
            embedding=embedding,
            layers=tuple(self._layer(i) for i in range(config.num_layers)),
            norm=self._norm("model.norm", config.hidden_size),
            # Tied or not, its packed form is another one than the table's.
            lm_head=make_linear(embedding, to_float32=True)
            if config.tie_word_embeddings
            else self._linear("lm_head", (), (config.vocab_size,), config.hidden_size, bias=False, to_float32=True),
            rope=RotaryEmbedding(config.rope, config.head_dim, factors, device=self._device),
        )

    def _layer(self, index: int) -> DecoderLayer:
        config = self._config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        qkv_sizes, gate_up_sizes = (q_size, kv_size, kv_size), (config.intermediate_size,) * 2
        hidden_size = config.hidden_size
        weights = LayerWeights(
            input_norm=self._norm(f"{layer}.input_layernorm", hidden_size),
            qkv=self._linear(attention, ("q_proj", "k_proj", "v_proj"), qkv_sizes, hidden_size, bias=config.qkv_bias),
            q_norm=self._norm(f"{attention}.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=self._norm(f"{attention}.k_norm", config.head_dim) if config.qk_norm else None,
            o=self._linear(attention, ("o_proj",), (hidden_size,), q_size, bias=config.o_bias),
            post_attention_norm=self._norm(f"{layer}.post_attention_layernorm", hidden_size),
            gate_up=self._linear(mlp, ("gate_proj", "up_proj"), gate_up_sizes, hidden_size, bias=config.mlp_bias),
            down=self._linear(mlp, ("down_proj",), (hidden_size,), config.intermediate_size, bias=config.mlp_bias),
        )
        plain = PlainLayer(
            weights,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=config.layer_windows[index],
            kv_scales=KVScales(self._kv_scale(attention, "k"), self._kv_scale(attention, "v")),
        )
        return FusedLayer(plain) if FusedLayer.takes(plain) else plain

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _kv_scale(self, attention: str, side: str) -> float:
        """As checkpoints that were calibrated for an 8-bit cache have it, under either of two names; else 1."""
        if not self._with_kv_scales:
            return 1.0
        for name in (f"{attention}.{side}_scale", f"{attention}.{side}_proj.{side}_scale"):
            if (scale := self._source.scalar(name)) is not None:
                if not 0.0 < scale < math.inf:
                    raise ModelLoadError(f"tensor {name} must be above 0, not {scale}")
                return scale
        return 1.0

    def _norm(self, name: str, size: int) -> RMSNorm:
        weight = self._empty(size)
        self._source.copy_into(f"{name}.weight", weight)
        return RMSNorm(weight, self._config.rms_norm_eps)

    def _linear(
        self,
        parent: str,
        parts: tuple[str, ...],
        out_sizes: tuple[int, ...],
        in_size: int,
        *,
        bias: bool,
        to_float32: bool = False,
    ) -> Linear:
        """One layer out of `parts` (children of `parent`; none: itself), one below the other."""
        names = [f"{parent}.{part}" for part in parts] or [parent]
        weight = self._empty(sum(out_sizes), in_size)
        for name, rows in zip(names, torch.split(weight, list(out_sizes)), strict=True):
            self._source.copy_into(f"{name}.weight", rows)
        if not bias:
            return make_linear(weight, to_float32=to_float32)
        biases = self._empty(sum(out_sizes))
        for name, items in zip(names, torch.split(biases, list(out_sizes)), strict=True):
            self._source.copy_into(f"{name}.bias", items)
        return make_linear(weight, biases, to_float32=to_float32)

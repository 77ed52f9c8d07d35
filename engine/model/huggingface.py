"""A Hugging Face `config.json` as a `ModelConfig`. Torch-free."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model.config import LinearScaling, Llama3Scaling, ModelConfig, RopeConfig, YarnScaling
from engine.model.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture decides by itself, where its config says nothing."""

    qkv_bias: bool | None = None  # None: as attention_bias says
    o_bias: bool | None = None
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size // num_attention_heads


_FAMILIES = {
    "LlamaForCausalLM": _Family(),
    "MistralForCausalLM": _Family(qkv_bias=False, o_bias=False),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, o_bias=False),
    "Qwen3ForCausalLM": _Family(qk_norm=True, head_dim=128),
}
_ARCHITECTURE_OF_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class _Fields:
    """A JSON object whose fields are asked for with a type; what does not fit is an error that names the field."""

    def __init__(self, source: str, fields: Mapping[str, Any]) -> None:
        self._source = source
        self._fields = fields

    def __contains__(self, name: str) -> bool:
        return self._fields.get(name) is not None  # null means absent, as for transformers

    def fail(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._source}: {what}")

    def raw(self, name: str) -> Any:
        return self._fields.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(f"{name} must be an integer, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.fail(f"{name} must be a number, not {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.fail(f"{name} must be true or false, not {value!r}")
        return value

    def object(self, name: str) -> "_Fields":
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.fail(f"{name} must be an object, not {value!r}")
        return _Fields(f"{self._source}: {name}", value)

    def _get(self, name: str, default: Any) -> Any:
        if name in self:
            return self._fields[name]
        if default is None:
            raise self.fail(f"{name} is missing")
        return default


def read_config(folder: Path) -> ModelConfig:
    """Reads `config.json`, and the end-of-sequence ids of `generation_config.json` if there is one.

    Raises:
        ModelLoadError: missing, malformed or not supported.
    """
    fields = _read_json(folder / "config.json")
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    if fields.raw("quantization_config"):
        raise fields.fail("quantized safetensors (quantization_config) are not supported, GGUF files are")
    activation = fields.raw("hidden_act") or "silu"
    if activation != "silu":
        raise fields.fail(f"hidden_act must be silu, not {activation!r}")

    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    if num_heads <= 0:
        raise fields.fail(f"num_attention_heads must be above 0, not {num_heads}")
    head_dim = fields.integer("head_dim", family.head_dim or hidden_size // num_heads)
    attention_bias = fields.boolean("attention_bias", False)
    rope = _rope(fields)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads if architecture == "LlamaForCausalLM" else None),
        head_dim=head_dim,
        max_position_embeddings=_max_positions(fields, rope),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        layer_windows=_layer_windows(fields, architecture, num_layers),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        qk_norm=family.qk_norm,
        eos_token_ids=_eos_token_ids(folder, fields),
    )


def _read_json(file: Path) -> _Fields:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ModelLoadError(f"{file} does not exist") from exc
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as exc:
        raise ModelLoadError(f"{file} is not readable as JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return _Fields(str(file), content)


def _architecture(fields: _Fields) -> str:
    named = fields.raw("architectures")
    if isinstance(named, list) and named:
        architecture = str(named[0])
    else:
        architecture = _ARCHITECTURE_OF_TYPE.get(str(fields.raw("model_type")), str(fields.raw("model_type")))
    if architecture not in _FAMILIES:
        raise fields.fail(f"architecture {architecture} is not supported; supported are {', '.join(_FAMILIES)}")
    return architecture


def _layer_windows(fields: _Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    everything: tuple[int | None, ...] = (None,) * num_layers
    if "sliding_window" not in fields or architecture == "LlamaForCausalLM":
        return everything
    if architecture == "MistralForCausalLM":
        return (fields.integer("sliding_window"),) * num_layers
    if not fields.boolean("use_sliding_window", False):
        return everything
    window = fields.integer("sliding_window")
    layer_types = fields.raw("layer_types")
    if layer_types is None:
        first = fields.integer("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(layer_types, list) or not set(layer_types) <= known.keys():
        raise fields.fail(f"layer_types must be a list of {' and '.join(known)}, not {layer_types!r}")
    return tuple(known[layer_type] for layer_type in layer_types)


def _rope(fields: _Fields) -> RopeConfig:
    """transformers 5 writes `rope_parameters`, with theta in it; before, `rope_theta` stood beside `rope_scaling`."""
    name = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    rope = fields.object(name)
    if "full_attention" in rope or "sliding_attention" in rope:
        raise rope.fail("rotary embeddings that differ by layer type are not supported")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    for place in (rope, fields):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise place.fail("rotary embeddings of a part of the head (partial_rotary_factor) are not supported")

    kind = rope.raw("rope_type") or rope.raw("type") or "default"
    # Some checkpoints carry it outside, and then that one counts.
    original = fields.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", fields.integer("max_position_embeddings")),
    )
    if original <= 0:
        raise rope.fail(f"original_max_position_embeddings must be above 0, not {original}")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "dynamic":
        # Up to max_position_embeddings it changes nothing, and that is all the context we offer: beyond, every key
        # would depend on the length of the whole, so that no block could be kept, shared or handed over.
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, LinearScaling(rope.number("factor")))
    if kind == "llama3":
        return RopeConfig(
            theta,
            Llama3Scaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position_embeddings=original,
            ),
        )
    if kind == "yarn":
        return RopeConfig(theta, _yarn(rope, original, fields.integer("max_position_embeddings")))
    raise rope.fail(f"rope type {kind!r} is not supported; supported are default, linear, dynamic, llama3 and yarn")


def _yarn(rope: _Fields, original: int, max_position_embeddings: int) -> YarnScaling:
    factor = rope.number("factor", max_position_embeddings / original)

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0

    if "attention_factor" in rope:
        attention_factor = rope.number("attention_factor")
    elif rope.raw("mscale") and rope.raw("mscale_all_dim"):
        attention_factor = magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    else:
        attention_factor = magnitude(1.0)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
    )


def _max_positions(fields: _Fields, rope: RopeConfig) -> int:
    """YaRN configs tend to keep the context from before the stretching beside the factor."""
    stated = fields.integer("max_position_embeddings")
    if isinstance(rope.scaling, YarnScaling):
        return max(stated, int(rope.scaling.original_max_position_embeddings * rope.scaling.factor))
    return stated


def _eos_token_ids(folder: Path, fields: _Fields) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    for source in (*((_read_json(generation),) if generation.is_file() else ()), fields):
        value = source.raw("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise source.fail(f"eos_token_id must be an integer or a list of them, not {value!r}")
        return tuple(ids)
    return ()

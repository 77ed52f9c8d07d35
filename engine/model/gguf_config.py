"""GGUF metadata as a `ModelConfig`. Torch-free."""

import math
from pathlib import Path

from engine.model.config import LinearScaling, ModelConfig, RopeConfig, YarnScaling
from engine.model.errors import ModelLoadError
from engine.model.gguf_file import GGUFFile

# Mistral, SmolLM and others are written as llama.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")


def read_gguf_config(path: Path) -> ModelConfig:
    """Reads the description of the model in one GGUF file.

    Raises:
        ModelLoadError: missing, damaged or not supported.
    """
    with GGUFFile(path) as file:
        return config_of(file)


def config_of(file: GGUFFile) -> ModelConfig:
    """The description of the model in an open GGUF file."""
    fields = _Metadata(file)
    architecture = fields.string("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise fields.fail(f"architecture {architecture} is not supported; supported are {', '.join(_ARCHITECTURES)}")
    if fields.has("split.count") and fields.integer("split.count") > 1:
        raise fields.fail("a model split over several GGUF files is not supported")
    if fields.has("expert_count") and fields.integer("expert_count") > 0:
        raise fields.fail("mixtures of experts are not supported")

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise fields.fail("tensor token_embd.weight is missing or not a matrix")
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    if num_heads <= 0:
        raise fields.fail(f"attention.head_count must be above 0, not {num_heads}")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.fail(f"{key} {fields.integer(key)} differs from the head size {head_dim}: not supported")
    num_layers = fields.integer("block_count")
    window = fields.integer("attention.sliding_window", 0) or None
    rope = _rope(fields)
    return ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        tie_word_embeddings="output.weight" not in file.tensors,
        layer_windows=(window,) * num_layers,
        # What has a bias shows in the tensors alone.
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        eos_token_ids=_eos_token_ids(fields),
    )


class _Metadata:
    """Metadata values asked for with a type; keys without `general.` or `tokenizer.` get the architecture before."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def fail(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file.path}: {what}")

    def has(self, key: str) -> bool:
        return self._key(key) in self._file.metadata

    def string(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.fail(f"{self._key(key)} must be a string, not {value!r}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # some files give a value a layer
        if not isinstance(value, int):
            raise self.fail(f"{self._key(key)} must be an integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float):
            raise self.fail(f"{self._key(key)} must be a number, not {value!r}")
        return float(value)

    def _key(self, key: str) -> str:
        if key.startswith(("general.", "tokenizer.", "split.")):
            return key
        return f"{self._file.metadata.get('general.architecture')}.{key}"

    def _get(self, key: str, default: object) -> object:
        value = self._file.metadata.get(self._key(key), default)
        if value is None:
            raise self.fail(f"the metadata {self._key(key)} is missing")
        return value


def _rope(fields: _Metadata) -> RopeConfig:
    """Llama 3.1's scaling is not here: its files carry a tensor of factors, `rope_freqs.weight`."""
    theta = fields.number("rope.freq_base", 10_000.0)
    kind = fields.string("rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta)
    factor = fields.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return RopeConfig(theta, LinearScaling(factor))
    if kind == "yarn":
        magnitude = 1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0
        return RopeConfig(
            theta,
            YarnScaling(
                factor=factor,
                original_max_position_embeddings=fields.integer(
                    "rope.scaling.original_context_length", fields.integer("context_length")
                ),
                attention_factor=magnitude * fields.number("rope.scaling.attn_factor", 1.0),
                beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            ),
        )
    raise fields.fail(f"rope scaling {kind!r} is not supported; supported are none, linear and yarn")


def _eos_token_ids(fields: _Metadata) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(fields.integer(key) for key in keys if fields.has(key)))

"""What a model is: everything about it but its numbers. Torch-free."""

from dataclasses import dataclass
from pathlib import Path

from engine.model.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Rotary positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: low frequencies divided by `factor`, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): frequencies interpolated by parts, cos and sin multiplied by `attention_factor`."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. A table of factors a frequency may come with the weights instead (GGUF)."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family.

    Raises:
        ModelLoadError: numbers that do not fit each other; the message names them.
    """

    architecture: str  # as its file says: LlamaForCausalLM, …, or GGUF's llama, …
    vocab_size: int  # rows of the embedding: token ids are below it
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    layer_windows: tuple[int | None, ...]  # a layer: how many keys a query sees, itself included; None: all
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            self._must(getattr(self, name) > 0, f"{name} must be above 0, not {getattr(self, name)}")
        self._must(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}",
        )
        self._must(
            self.head_dim > 0 and self.head_dim % 2 == 0, f"head_dim must be even and above 0, not {self.head_dim}"
        )
        self._must(self.max_position_embeddings > 0, f"max_position_embeddings is {self.max_position_embeddings}")
        self._must(self.rms_norm_eps >= 0, f"rms_norm_eps must not be below 0: {self.rms_norm_eps}")
        self._must(self.rope.theta > 0, f"rope theta must be above 0, not {self.rope.theta}")
        if self.rope.scaling is not None:
            factor = self.rope.scaling.factor
            self._must(factor > 0, f"the rope scaling's factor must be above 0, not {factor}")
        self._must(
            len(self.layer_windows) == self.num_layers,
            f"{len(self.layer_windows)} layers are described, but num_layers is {self.num_layers}",
        )
        self._must(all(w is None or w > 0 for w in self.layer_windows), f"sliding windows: {self.layer_windows}")

    def _must(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise ModelLoadError(f"the config of this {self.architecture} does not fit together: {otherwise}")

    def bytes_per_block(self, block_size: int, item_bytes: int) -> int:
        """Of a KV block of all layers: K and V of `block_size` tokens, in numbers of `item_bytes` each."""
        return self.num_layers * 2 * self.num_kv_heads * block_size * self.head_dim * item_bytes

    @classmethod
    def load(cls, path: Path) -> "ModelConfig":
        """Reads the description of the model at `path` (as `resolve_model` returns it), not its weights.

        Raises:
            ModelLoadError: missing, unreadable, or a model that is not supported.
        """
        # Here, not above: both import this module.
        if path.is_dir():
            from engine.model.huggingface import read_config

            return read_config(path)
        from engine.model.gguf_config import read_gguf_config

        return read_gguf_config(path)

"""Tiny random models of every supported architecture, made with transformers' own classes, and a bare way to run ours.

Each is small in everything but has something odd: groups of three heads, one KV head, a head size that is no quotient.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.attention import get_backend
from engine.attention.backend import AttentionBackend, AttentionShape, build_metadata
from engine.executor import ScheduledRequest
from engine.memory import PrivateMemory
from engine.model.config import ModelConfig
from engine.model.weights import load_llama

VOCAB_SIZE = 97
CONTEXT = 128


def _sizes(**changes: object) -> dict[str, object]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": 5,
        **changes,
    }


def _llama(**changes: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_sizes(**changes)))


def _llama_with_rope(**rope: object) -> PreTrainedModel:
    return _llama(rope_parameters={"rope_theta": 10_000.0, **rope})


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "llama-tied": lambda: _llama(tie_word_embeddings=True, num_attention_heads=3, num_key_value_heads=1),
    "llama-head-dim": lambda: _llama(head_dim=10, num_attention_heads=4, num_key_value_heads=4),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-linear-rope": lambda: _llama_with_rope(rope_type="linear", factor=2.5),
    "llama-dynamic-rope": lambda: _llama_with_rope(rope_type="dynamic", factor=2.0),
    "llama-yarn-rope": lambda: _llama_with_rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=CONTEXT // 4
    ),
    "llama3-rope": lambda: _llama_with_rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=CONTEXT // 8,
    ),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**_sizes(head_dim=12, sliding_window=7))),
    "mistral-no-window": lambda: MistralForCausalLM(MistralConfig(**_sizes(sliding_window=None))),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_sizes(num_attention_heads=3, num_key_value_heads=3))),
    "qwen2-window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**_sizes(use_sliding_window=True, sliding_window=5, max_window_layers=1, tie_word_embeddings=True))
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_sizes(head_dim=16, rope_parameters={"rope_theta": 1e6}))),
}


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A model of `MODELS` whose every number is random: norms and biases too, which initializers leave at 1 and 0."""
    torch.manual_seed(seed)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[1] ** 0.5)
    return model


def save_model(folder: Path, name: str = "llama", seed: int = 0) -> PreTrainedModel:
    """Makes a model and saves it as a Hugging Face folder."""
    model = make_model(name, seed)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def logits_of(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' logits, [num_tokens, vocab_size]."""
    logits: torch.Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids of the tiny vocabulary."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).tolist()


class PagedRunner:
    """Our model over a small pool, without a scheduler: the test says what is computed when, and in which blocks."""

    def __init__(
        self,
        path: Path,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        attention_backend: str = "reference",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config: ModelConfig = ModelConfig.load(path)
        self.model = load_llama(path, self.config, dtype)
        self.shape = AttentionShape(
            self.config.num_heads,
            self.config.num_kv_heads,
            self.config.head_dim,
            block_size,
            dtype,
            dtype,
            self.config.head_dim**-0.5,
            frozenset(self.config.layer_windows),
        )
        self._attention: AttentionBackend = get_backend(attention_backend)
        self._attention.prepare(self.shape)
        self._block_size = block_size
        shape = (num_blocks, self.config.num_layers, 2, self.config.num_kv_heads, block_size, self.config.head_dim)
        self._memory = PrivateMemory(int(np.prod(shape)) * dtype.itemsize)
        pool = torch.frombuffer(self._memory.buffer, dtype=dtype).view(shape)
        pool.fill_(float("nan"))  # whatever is read before it is written shows
        self.layer_kvs = list(pool.unbind(dim=1))

    @torch.inference_mode()
    def step(self, *shares: tuple[Sequence[int], int, Sequence[int]]) -> list[torch.Tensor]:
        """One batch of (token ids, computed before, block table); the logits of all tokens of each."""
        requests = [
            ScheduledRequest(str(i), tokens, computed, (table,), None)
            for i, (tokens, computed, table) in enumerate(shares)
        ]
        token_ids = torch.tensor([t for r in requests for t in r.token_ids])
        metadata = build_metadata(requests, block_size=self._block_size)
        self._attention.plan(metadata)
        positions = torch.from_numpy(metadata.positions)
        logits = self.model.forward(token_ids, positions, self._attention, self.layer_kvs, torch.arange(len(token_ids)))
        return list(logits.split([len(r.token_ids) for r in requests]))

    def run(self, token_ids: Sequence[int], chunks: Sequence[int], table: Sequence[int]) -> torch.Tensor:
        """The logits of all tokens, computed in chunks of the given sizes, the last repeated."""
        computed, logits, sizes = 0, [], list(chunks)
        while computed < len(token_ids):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            logits += self.step((token_ids[computed : computed + size], computed, table))
            computed += size
        return torch.cat(logits)

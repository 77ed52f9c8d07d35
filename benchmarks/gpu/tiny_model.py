"""Random models of the Llama family as Hugging Face folders, written without transformers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 256


def write_tiny_model(folder: Path, *, head_dim: int = 16) -> Path:
    """Three layers, groups of two heads; every number random, so that tokens depend on everything."""
    return write_model(
        folder,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=160,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype=torch.float32,
    )


def write_model(
    folder: Path,
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    max_position_embeddings: int = 8192,
) -> Path:
    """Writes config.json and model.safetensors into `folder`, and returns it. Numbers are made on `device`."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn((rows, columns), generator=generator, device=device, dtype=torch.float32)
        return torch.div(values, columns**0.5).to("cpu", dtype)

    def norm() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(hidden_size, generator=generator, device=device)).to("cpu", dtype)

    tensors = {"model.embed_tokens.weight": matrix(vocab_size, hidden_size) * 4, "model.norm.weight": norm()}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": norm(),
            f"{prefix}.post_attention_layernorm.weight": norm(),
            f"{prefix}.self_attn.q_proj.weight": matrix(num_heads * head_dim, hidden_size),
            f"{prefix}.self_attn.k_proj.weight": matrix(num_kv_heads * head_dim, hidden_size),
            f"{prefix}.self_attn.v_proj.weight": matrix(num_kv_heads * head_dim, hidden_size),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden_size, num_heads * head_dim),
            f"{prefix}.mlp.gate_proj.weight": matrix(intermediate_size, hidden_size),
            f"{prefix}.mlp.up_proj.weight": matrix(intermediate_size, hidden_size),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden_size, intermediate_size),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

"""Writes a transformers model as a GGUF file, as the usual converter does: names, order of q and k, metadata."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

# A matrix and its name -> its packed bytes and their type.
Packer = Callable[[str, npt.NDArray[np.float32]], tuple[npt.NDArray[np.uint8], GGMLQuantizationType]]


def packed_as(quantization: GGMLQuantizationType) -> Packer:
    """Every matrix in one type."""
    return lambda name, values: (quantize(values, quantization), quantization)


PACKED_AS_F32 = packed_as(GGMLQuantizationType.F32)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    pack: Packer = PACKED_AS_F32,
    *,
    metadata: dict[str, object] | None = None,
    leave_out: tuple[str, ...] = (),
    rope_factors: npt.NDArray[np.float32] | None = None,
) -> None:
    """Writes `model`, and puts into it what its weights have become by being packed."""
    config = model.config
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = GGUFWriter(path, architecture)
    values: dict[str, object] = {
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.key_length": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{architecture}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.tokens": [f"token {i}" for i in range(config.vocab_size)],
        **(metadata or {}),
    }
    for key, value in values.items():
        _add(writer, key, value)

    arch_id = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch_id, config.num_hidden_layers)
    with torch.no_grad():
        for hf_name, parameter in model.named_parameters():  # tied ones once
            name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
            assert name is not None
            if name in leave_out:
                continue
            array = parameter.numpy()
            num_heads = 0
            if architecture == "llama" and ".attn_q." in name:
                num_heads = config.num_attention_heads
            if architecture == "llama" and ".attn_k." in name:
                num_heads = config.num_key_value_heads
            array = _permuted(array, num_heads) if num_heads else array
            if array.ndim == 1:
                writer.add_tensor(name, array.astype(np.float32))
                continue
            data, quantization = pack(name, np.ascontiguousarray(array))
            writer.add_tensor(name, data, raw_dtype=quantization)
            unpacked = dequantize(data, quantization).reshape(array.shape)
            unpacked = _unpermuted(unpacked, num_heads) if num_heads else unpacked
            parameter.copy_(torch.from_numpy(unpacked.copy()))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def _permuted(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _unpermuted(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)

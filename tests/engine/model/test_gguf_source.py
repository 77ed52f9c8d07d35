"""Models in GGUF files: every type of tensor, every architecture, everything that can be wrong."""

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from engine.model.config import ModelConfig
from engine.model.errors import ModelLoadError
from engine.model.weights import load_llama
from tests.tiny_gguf import PACKED_AS_F32, packed_as, write_gguf
from tests.tiny_models import MODELS, VOCAB_SIZE, PagedRunner, logits_of, make_model, random_tokens

TABLE = list(range(1, 11))


def close_to_transformers(path: Path, model: LlamaForCausalLM) -> None:
    tokens = random_tokens(20)
    ours = PagedRunner(path).run(tokens, [13, 1], TABLE)
    torch.testing.assert_close(ours, logits_of(model, tokens), atol=1e-4, rtol=0)


def packable_model(hidden_size: int = 64) -> LlamaForCausalLM:
    """Rows that are multiples of what the quantized types pack together (32, or 256)."""
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=hidden_size**-0.5,
        )
    ).eval()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_logits_equal_transformers_when_weights_are_packed(tmp_path: Path, name: str) -> None:
    model = packable_model()
    write_gguf(tmp_path / "model.gguf", model, packed_as(GGMLQuantizationType[name]))
    close_to_transformers(tmp_path / "model.gguf", model)


def random_k_blocks(quantization: GGMLQuantizationType, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Random packed rows; the gguf package unpacks K types but does not pack them."""
    size = {GGMLQuantizationType.Q4_K: 144, GGMLQuantizationType.Q5_K: 176, GGMLQuantizationType.Q6_K: 210}[
        quantization
    ]
    rng = np.random.default_rng(rows * columns)
    blocks = rng.integers(0, 256, (rows * columns // 256, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
    if quantization == GGMLQuantizationType.Q6_K:
        blocks[:, 208:] = scale
    else:
        blocks[:, :2] = scale
        blocks[:, 2:4] = np.frombuffer(np.float16(1.5e-3).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_logits_equal_transformers_when_weights_are_packed_in_k_blocks(tmp_path: Path, name: str) -> None:
    quantization = GGMLQuantizationType[name]
    model = packable_model(hidden_size=256)
    write_gguf(
        tmp_path / "model.gguf",
        model,
        lambda _, values: (random_k_blocks(quantization, *values.shape), quantization),
    )
    close_to_transformers(tmp_path / "model.gguf", model)


def scalar_q4_k(block: bytes) -> list[float]:
    """The format in words: 8 groups of 32 items, each with a 6-bit scale and a 6-bit minimum."""
    d, dmin = struct.unpack("<2e", block[:4])
    packed, quants = block[4:16], block[16:]
    values = []
    for group in range(8):
        if group < 4:
            scale, low = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            low = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        for item in range(32):
            byte = quants[group // 2 * 32 + item]
            values.append(d * scale * (byte >> 4 if group % 2 else byte & 15) - dmin * low)
    return values


def scalar_q6_k(block: bytes) -> list[float]:
    """256 items of 4 low and 2 high bits, less 32; 16 groups of 16, each with an 8-bit scale."""
    low, high, scales = block[:128], block[128:192], struct.unpack("16b", block[192:208])
    (d,) = struct.unpack("<e", block[208:])
    values = []
    for i in range(256):
        half, quarter, column = i // 128, i // 32 % 4, i % 32
        byte = low[half * 64 + quarter % 2 * 32 + column]
        four = byte >> 4 if quarter >= 2 else byte & 15
        two = high[half * 32 + column] >> 2 * quarter & 3
        values.append(d * scales[i // 16] * ((four | two << 4) - 32))
    return values


@pytest.mark.parametrize(
    ("quantization", "by_hand"), [(GGMLQuantizationType.Q4_K, scalar_q4_k), (GGMLQuantizationType.Q6_K, scalar_q6_k)]
)
def test_k_blocks_mean_what_their_format_says(quantization: GGMLQuantizationType, by_hand: object) -> None:
    rows = random_k_blocks(quantization, 6, 256)
    expected = np.array([by_hand(row.tobytes()) for row in rows])  # type: ignore[operator]
    np.testing.assert_allclose(dequantize(rows, quantization), expected, rtol=1e-5, atol=1e-7)


# GGUF says a window for all layers or none, so not qwen2-window.
@pytest.mark.parametrize("name", [n for n in MODELS if "rope" not in n and n != "qwen2-window"])
def test_logits_equal_transformers_when_an_architecture_is_in_gguf(tmp_path: Path, name: str) -> None:
    model = make_model(name)
    metadata: dict[str, object] = {}
    if name == "mistral-window":
        metadata["llama.attention.sliding_window"] = model.config.sliding_window
    write_gguf(tmp_path / "model.gguf", model, metadata=metadata)
    close_to_transformers(tmp_path / "model.gguf", model)


def test_llama3_scaling_is_taken_from_the_table_of_factors(tmp_path: Path) -> None:
    model = make_model("llama3-rope")
    plain = make_model("llama").model.rotary_emb.inv_freq
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 2
    write_gguf(tmp_path / "model.gguf", model, rope_factors=factors)
    close_to_transformers(tmp_path / "model.gguf", model)


@pytest.mark.parametrize(
    ("name", "metadata"),
    [
        ("llama-linear-rope", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}),
        (
            "llama-yarn-rope",
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
        ),
    ],
)
def test_rope_scaling_is_taken_from_metadata(tmp_path: Path, name: str, metadata: dict[str, object]) -> None:
    model = make_model(name)
    write_gguf(tmp_path / "model.gguf", model, metadata=metadata)
    close_to_transformers(tmp_path / "model.gguf", model)


def load(path: Path) -> None:
    load_llama(path, ModelConfig.load(path), torch.float32)


def test_a_file_cut_short_is_one_clear_error_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, packable_model())
    whole = path.read_bytes()
    short = tmp_path / "short.gguf"
    for length in [0, 3, 7, 20, 100, 1000, len(whole) // 2, len(whole) - 1]:
        short.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"short\.gguf (is|cannot)"):
            load(short)


def test_a_header_that_promises_too_much_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63) + bytes(64))
    with pytest.raises(ModelLoadError, match="damaged"):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"GGML" + bytes(60), "is not a GGUF file"), (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1")],
)
def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"none\.gguf does not exist"):
        load(tmp_path / "none.gguf")


def test_a_type_that_is_not_supported_is_named_with_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    iq4 = GGMLQuantizationType.IQ4_NL  # 32 items in 18 bytes

    def pack(name: str, values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], GGMLQuantizationType]:
        if name == "blk.1.ffn_up.weight":
            return np.zeros((values.shape[0], values.shape[1] // 32 * 18), np.uint8), iq4
        return PACKED_AS_F32(name, values)

    write_gguf(path, packable_model(), pack)
    with pytest.raises(ModelLoadError, match=r"tensor blk\.1\.ffn_up\.weight is IQ4_NL; supported are F32, "):
        load(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, packable_model(), leave_out=("blk.1.attn_k.weight",))
    with pytest.raises(ModelLoadError, match=r"tensor blk\.1\.attn_k\.weight is missing"):
        load(path)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, packable_model(), metadata={"llama.feed_forward_length": 96})
    with pytest.raises(ModelLoadError, match=r"ffn_gate\.weight has the shape \[128, 64\], .* \[96, 64\]"):
        load(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8 differs from the head size 16"),
        ({"llama.expert_count": 8}, "mixtures of experts are not supported"),
        ({"llama.attention.head_count": "four"}, "head_count must be an integer, not 'four'"),
        ({"split.count": 3}, "split over several"),
    ],
)
def test_metadata_that_is_not_supported_is_named(tmp_path: Path, metadata: dict[str, object], message: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, packable_model(), metadata=metadata)
    with pytest.raises(ModelLoadError, match=message):
        load(path)


def test_an_architecture_that_is_not_supported_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="architecture gemma3 is not supported; supported are llama, qwen2, qwen3"):
        load(path)


def test_a_float_in_metadata_means_its_shortest_decimal(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = packable_model()
    model.config.rms_norm_eps = 1e-5
    write_gguf(path, model, metadata={"llama.rope.freq_base": 500_000.5})
    config = ModelConfig.load(path)
    assert config.rms_norm_eps == 1e-5
    assert config.rope.theta == 500_000.5
    assert config.eos_token_ids == (5,)
    assert not config.tie_word_embeddings

"""config.json, old and new spelling, and what is refused."""

import json
from pathlib import Path

import pytest

from engine.model.config import (
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    YarnScaling,
)
from engine.model.errors import ModelLoadError
from tests.tiny_models import MODELS, make_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def load(folder: Path, changes: dict[str, object], generation: object = None) -> ModelConfig:
    config = {k: v for k, v in {**LLAMA, **changes}.items() if v != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.load(folder)


def test_a_plain_llama_is_read(tmp_path: Path) -> None:
    assert load(tmp_path, {}) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10_000.0),
        tie_word_embeddings=False,
        layer_windows=(None, None, None),
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_writes_is_read(tmp_path: Path, name: str) -> None:
    model = make_model(name)
    model.config.save_pretrained(tmp_path)
    config = ModelConfig.load(tmp_path)
    assert (config.vocab_size, config.num_layers, config.eos_token_ids) == (97, 3, (5,))
    assert config.tie_word_embeddings == model.config.tie_word_embeddings


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(5e5)),
        ({"rope_theta": 7, "rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(7.0, LinearScaling(2.0))),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, RopeConfig(1e4)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 128)),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 128)),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
            RopeConfig(1e4, YarnScaling(4.0, 512, 1.5)),
        ),
    ],
)
def test_rope_is_read_in_either_spelling(tmp_path: Path, changes: dict[str, object], rope: RopeConfig) -> None:
    assert load(tmp_path, changes).rope == rope


def test_yarn_offers_the_stretched_context(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert load(tmp_path, {"rope_scaling": yarn}).max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, (9, 9, 9)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 3),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "use_sliding_window": False}, (None,) * 3),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            (None, None, 9),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, None, 9),
        ),
    ],
)
def test_windows_are_read(tmp_path: Path, changes: dict[str, object], windows: tuple[int | None, ...]) -> None:
    assert load(tmp_path, changes).layer_windows == windows


@pytest.mark.parametrize(
    ("generation", "ids"),
    [(None, (2,)), ({"eos_token_id": [7, 8]}, (7, 8)), ({"eos_token_id": 9}, (9,)), ({"top_p": 0.5}, (2,))],
)
def test_end_ids_of_the_generation_config_count_first(tmp_path: Path, generation: object, ids: object) -> None:
    assert load(tmp_path, {}, generation).eos_token_ids == ids


def test_biases_and_norms_follow_from_the_architecture(tmp_path: Path) -> None:
    qwen2 = load(tmp_path, {"architectures": ["Qwen2ForCausalLM"]})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = load(tmp_path, {"architectures": ["Qwen3ForCausalLM"]})
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)
    llama = load(tmp_path, {"attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "architecture GemmaForCausalLM is not supported; supported are Llama",
        ),
        ({"architectures": "absent", "model_type": "gpt2"}, "architecture gpt2 is not supported"),
        ({"hidden_size": "absent"}, "config.json: hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer, not '64'"),
        ({"num_hidden_layers": 0}, "num_layers must be above 0, not 0"),
        ({"num_attention_heads": 0}, "num_attention_heads must be above 0, not 0"),
        ({"num_key_value_heads": 3}, "num_heads 8 is no multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim must be even and above 0, not 7"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, not 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized safetensors"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor must be above 0, not 0"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0}}, "must be above 0, not 0"),
        ({"rope_parameters": {"full_attention": {}}}, "differ by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"eos_token_id": "two"}, "eos_token_id must be an integer or a list of them, not 'two'"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, changes)


@pytest.mark.parametrize(("content", "message"), [("{", "not readable as JSON"), ("[]", "must hold a JSON object")])
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        ModelConfig.load(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json does not exist"):
        ModelConfig.load(tmp_path)

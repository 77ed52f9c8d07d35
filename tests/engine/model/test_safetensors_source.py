"""Folders of safetensors: one file, shards, and everything that can be wrong."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.config import ModelConfig
from engine.model.errors import ModelLoadError
from engine.model.weights import load_llama
from tests.tiny_models import PagedRunner, logits_of, make_model, random_tokens, save_model

TABLE = list(range(1, 11))


def load(folder: Path) -> None:
    load_llama(folder, ModelConfig.load(folder), torch.float32)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_logits_equal_transformers_when_weights_are_in_shards(tmp_path: Path, name: str) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = random_tokens(20)
    ours = PagedRunner(tmp_path).run(tokens, [20], TABLE)
    torch.testing.assert_close(ours, logits_of(model, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_half_the_width_are_widened(tmp_path: Path, dtype: torch.dtype) -> None:
    make_model("llama").to(dtype).save_pretrained(tmp_path)
    model = make_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    tokens = random_tokens(20)
    ours = PagedRunner(tmp_path).run(tokens, [20], TABLE)
    torch.testing.assert_close(ours, logits_of(model, tokens), atol=1e-4, rtol=0)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    missing = sorted(tmp_path.glob("*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(ModelLoadError, match=f"{missing.name} does not exist"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": []}', "{}"])
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"index\.json is not a safetensors index"):
        load(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    make_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"has neither model\.safetensors nor"):
        load(tmp_path)


def test_a_file_cut_short_is_one_clear_error_wherever_it_ends(tmp_path: Path) -> None:
    save_model(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 5, 50, 500, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"model\.safetensors is cut short or damaged"):
            load(tmp_path)


def change_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    file = folder / "model.safetensors"
    tensors = {k: v for k, v in {**load_file(file), **changes}.items() if v is not None}
    save_file(tensors, file, {"format": "pt"})


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_model(tmp_path)
    change_tensors(tmp_path, {"model.layers.2.mlp.up_proj.weight": None})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.2\.mlp\.up_proj\.weight is missing"):
        load(tmp_path)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 98}))
    with pytest.raises(ModelLoadError, match=r"embed_tokens\.weight has the shape \[97, 48\], .* \[98, 48\]"):
        load(tmp_path)


def test_a_type_that_is_not_supported_is_named(tmp_path: Path) -> None:
    save_model(tmp_path)
    change_tensors(tmp_path, {"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight is torch\.int8; supported are"):
        load(tmp_path)

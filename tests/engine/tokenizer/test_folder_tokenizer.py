"""Tokenizers out of Hugging Face folders that are written here."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from engine.tokenizer.tokenizer import Tokenizer

VOCABULARY = {token: i for i, token in enumerate([*"abc", "Ġ", "ab", "<s>", "</s>", "<turn>"])}


def write_folder(folder: Path, decoder: decoders.Decoder | None = None, **files: Any) -> Path:
    encoder = Encoder(models.BPE(vocab=VOCABULARY, merges=[("a", "b")]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoder or decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken(token, normalized=False) for token in ("<s>", "</s>", "<turn>")])
    encoder.enable_truncation(max_length=3)
    folder.mkdir(exist_ok=True)
    encoder.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        if name == "template":
            (folder / "chat_template.jinja").write_text(content)
        else:
            (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_folder_gives_encoder_special_tokens_and_ends(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "m",
        tokenizer_config={
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "special": True},
            "chat_template": "old",
        },
        generation_config={"eos_token_id": [VOCABULARY["<turn>"]]},
        config={"eos_token_id": VOCABULARY["</s>"]},
        template="new",
    )
    tokenizer = Tokenizer.load(folder)
    # The file's length limit is not ours: a prompt is never cut silently.
    assert tokenizer.raw_tokens(tokenizer.encode("ab ab ab c")) == ["ab", "Ġ", "ab", "Ġ", "ab", "Ġ", "c"]
    assert tokenizer.special.names == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.special.bos_token_id == VOCABULARY["<s>"]
    assert tokenizer.eos_token_ids == {VOCABULARY["</s>"], VOCABULARY["<turn>"]}
    assert tokenizer.chat_template == "new"
    assert tokenizer.decode(tokenizer.encode("ab<turn> c")) == "ab c"


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, None),
        ({"tokenizer_config": {"chat_template": "one"}}, "one"),
        ({"chat_template": {"chat_template": "file"}, "tokenizer_config": {"chat_template": "one"}}, "file"),
        (
            {
                "tokenizer_config": {
                    "chat_template": [
                        {"name": "tool_use", "template": "tools"},
                        {"name": "default", "template": "plain"},
                    ]
                }
            },
            "plain",
        ),
    ],
    ids=["none", "in the config", "in a file of its own", "one of several"],
)
def test_chat_template_is_found_where_folders_keep_it(
    tmp_path: Path, files: dict[str, Any], template: str | None
) -> None:
    assert Tokenizer.load(write_folder(tmp_path / "m", **files)).chat_template == template


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "generation_config"])
def test_damaged_file_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "m", **{name: '{"half": '})
    with pytest.raises(ValueError, match=rf"{name}\.json of m"):
        Tokenizer.load(folder)


def test_vocabulary_that_spells_bytes_in_an_unknown_way_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", decoder=decoders.WordPiece())
    with pytest.raises(ValueError, match="WordPiece"):
        Tokenizer.load(folder)

"""The tokenizer of a Hugging Face folder: tokenizer.json, and what its neighbours say about special tokens.

Read are `tokenizer_config.json` (names of special tokens, an older place for the chat template), `chat_template.jinja`
(the newer one), and `generation_config.json` and `config.json` (the ids that end a text).
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Encoder

from engine.tokenizer.tokenizer import SpecialTokens, Tokenizer

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_folder_tokenizer(folder: Path) -> Tokenizer:
    """From the files of `folder`.

    Raises:
        FileNotFoundError: there is no tokenizer.json.
        ValueError: a file that cannot be read as what its name says.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json: a model's folder must bring its tokenizer")
    try:
        encoder = Encoder.from_file(str(path))
    except Exception as exc:  # the library raises nothing narrower
        raise ValueError(f"tokenizer.json of {folder.name} cannot be read: {exc}") from exc
    # A length limit in the file would cut prompts silently.
    encoder.no_truncation()
    encoder.no_padding()
    config = _json(folder / "tokenizer_config.json")
    names = {name: text for name in _NAMES if (text := _content(config.get(name)))}
    ends = {encoder.token_to_id(names["eos_token"])} if "eos_token" in names else set()
    for file in ("generation_config.json", "config.json"):
        declared = _json(folder / file).get("eos_token_id")
        ends.update(declared if isinstance(declared, list) else [declared])
    bos = encoder.token_to_id(names["bos_token"]) if "bos_token" in names else None
    return Tokenizer(
        encoder,
        SpecialTokens(
            bos_token_id=bos,
            eos_token_ids=frozenset(i for i in ends if isinstance(i, int)),
            names=names,
        ),
        chat_template=_chat_template(folder, config),
        name=folder.name,
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as exc:
        raise ValueError(f"{path.name} of {path.parent.name} is not JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} of {path.parent.name} must hold a JSON object, not {type(content).__name__}")
    return content


def _content(token: Any) -> str | None:
    """A special token's text; files write it as a string, or as an object with flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = _json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):  # several under names
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None

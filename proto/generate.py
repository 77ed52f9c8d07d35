"""Makes the committed stubs from the .proto files; `--check` only says whether they are up to date."""

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent
PROTOS = sorted(ROOT.glob("tandem/v1/*.proto"))


def generate(out: Path) -> None:
    """Writes all stubs below `out`."""
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT}", *flags, *(str(p.relative_to(ROOT)) for p in PROTOS)]) != 0:
        sys.exit("protoc failed")


def main() -> None:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {p.relative_to(folder): p.read_text() for p in Path(folder).rglob("*.py*")}
    stale = [
        str(path) for path, text in fresh.items() if not (ROOT / path).is_file() or (ROOT / path).read_text() != text
    ]
    if stale:
        sys.exit(f"stubs differ from their .proto, run `make proto`: {', '.join(sorted(stale))}")


if __name__ == "__main__":
    main()

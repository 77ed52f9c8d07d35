"""The examples of docs/grpc.md, to be tried."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "docs" / "grpc.md"
ADDRESS = "127.0.0.1:8001"  # what the examples say


def blocks(language: str) -> list[str]:
    """Its blocks of code."""
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(), re.S | re.M)


def commands() -> list[str]:
    """Its command lines: each begins at the start of a line."""
    return [command for block in blocks("sh") for command in re.split(r"(?m)^(?=grpcurl)", block) if command.strip()]


def run_program(address: str) -> str:
    """What its program prints, with a server that is at another address."""
    (program,) = blocks("python")
    assert ADDRESS in program
    printed: list[str] = []

    def write(*values: object, end: str = "\n", flush: bool = False) -> None:
        printed.append(" ".join(map(str, values)) + end)

    exec(compile(program.replace(ADDRESS, address), str(GUIDE), "exec"), {"print": write})
    return "".join(printed)

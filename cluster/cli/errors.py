"""How a command fails: one sentence on stderr and an exit status, never a stack trace."""

import functools
from collections.abc import Callable
from typing import ParamSpec

import typer

P = ParamSpec("P")

FAILED = 1  # it was tried, and did not work
MISUSED = 2  # it was asked for wrongly: nothing was tried


class CommandError(Exception):
    """A command cannot go on. One sentence a problem."""

    def __init__(self, *sentences: str, exit_code: int = FAILED) -> None:
        super().__init__("; ".join(sentences))
        self.sentences = sentences
        self.exit_code = exit_code


def fails_in_a_sentence(command: Callable[P, None]) -> Callable[P, None]:
    """The command, its `CommandError` turned into words on stderr and the exit status."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except CommandError as exc:
            for sentence in exc.sentences:
                typer.echo(f"tandem: {sentence}", err=True)
            raise typer.Exit(exc.exit_code) from None

    return wrapped

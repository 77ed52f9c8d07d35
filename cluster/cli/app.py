"""The commands, put together."""

import typer

from cluster.cli.bench import bench
from cluster.cli.chat import chat
from cluster.cli.doctor import doctor
from cluster.cli.serve import serve
from cluster.cli.status import status

app = typer.Typer(
    name="tandem",
    help="Serve a language model with prefill and decode apart.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(chat)
app.command()(bench)
app.command()(status)
app.command()(doctor)

"""The flags that every command has which is a client of a server."""

from typing import Annotated

import typer

BaseUrlFlag = Annotated[str, typer.Option("--base-url", help="Of the server, with or without /v1.")]
ApiKeyFlag = Annotated[
    str | None, typer.Option("--api-key", envvar=["TANDEM_API_KEY", "OPENAI_API_KEY"], help="Sent as a bearer token.")
]
CaFileFlag = Annotated[str | None, typer.Option("--ca-file", help="PEM: who may have signed the server's certificate.")]

"""`tandem chat`: a conversation in the terminal, or one question and its answer.

A turn's life: read; sent with all turns before it (the server's prefix cache remembers them); the answer printed as it
streams; kept. Ctrl-C during an answer ends that answer, and is the end at the prompt.
"""

import asyncio
import ssl
import sys
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.cli.api_client import DEFAULT_BASE_URL, ApiClient, ServerError, trust
from cluster.cli.client_flags import ApiKeyFlag, BaseUrlFlag, CaFileFlag
from cluster.cli.errors import CommandError, fails_in_a_sentence


@dataclass(slots=True)
class Conversation:
    """The turns so far, and how answers are sampled."""

    model: str
    sampling: dict[str, Any]
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def payload(self) -> dict[str, Any]:
        """The request for the next answer."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {
            "model": self.model,
            "messages": system + self.turns,
            "stream_options": {"include_usage": True},
            **self.sampling,
        }


@dataclass(frozen=True, slots=True)
class _Server:
    """Who is asked. Each turn has a client of its own: every one runs in a loop of its own."""

    base_url: str
    api_key: str | None = field(repr=False)
    tls: ssl.SSLContext | None

    def client(self) -> ApiClient:
        return ApiClient(self.base_url, api_key=self.api_key, tls=self.tls)


@fails_in_a_sentence
def chat(
    question: Annotated[str | None, typer.Argument(help="One question; without it, a conversation.")] = None,
    base_url: BaseUrlFlag = DEFAULT_BASE_URL,
    model: Annotated[str | None, typer.Option(help="(default: the first that the server names)")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before all else.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this mass.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Equal seeds answer equally.")] = None,
    api_key: ApiKeyFlag = None,
    ca_file: CaFileFlag = None,
) -> None:
    """Talk to a served model."""
    options = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    sampling = {name: value for name, value in options.items() if value is not None}
    try:
        server = _Server(base_url, api_key, None if ca_file is None else trust(ca_file))
        conversation = Conversation(model or asyncio.run(_first_model(server)), sampling, system)
        if question is not None:
            asyncio.run(_answer(server, conversation, question))
        else:
            _converse(server, conversation)
    except ServerError as exc:
        raise CommandError(str(exc)) from exc


def _converse(server: _Server, conversation: Conversation) -> None:
    notes = Console(stderr=True, highlight=False)
    interactive = sys.stdin.isatty()
    if interactive:
        notes.print(
            f"[dim]{conversation.model} at {server.base_url} · /new forgets the conversation · Ctrl-D ends it[/]"
        )
    while True:
        try:
            question = (input("> ") if interactive else input()).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if question == "/new":
            conversation.turns.clear()
        elif question:
            try:
                note = asyncio.run(_answer(server, conversation, question))
            except KeyboardInterrupt:
                typer.echo()
            except ServerError as exc:
                if not interactive:
                    raise
                # Said, and the conversation goes on: the next question may be answered.
                notes.print(f"[red]{exc}[/]")
            else:
                if interactive:
                    notes.print(f"[dim]{note}[/]")


async def _first_model(server: _Server) -> str:
    async with server.client() as client:
        return await client.model()


async def _answer(server: _Server, conversation: Conversation, question: str) -> str:
    """Prints the answer as it comes and keeps both turns; returns a note on where and how fast it was made."""
    conversation.turns.append({"role": "user", "content": question})
    pieces: list[str] = []
    start, first_s, num_tokens = time.perf_counter(), 0.0, 0
    try:
        async with (
            server.client() as client,
            client.stream("/v1/chat/completions", conversation.payload()) as stream,
        ):
            async for chunk in stream.chunks:
                num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
                for choice in chunk.get("choices") or ():
                    if piece := (choice.get("delta") or {}).get("content"):
                        first_s = first_s or time.perf_counter() - start
                        pieces.append(piece)
                        typer.echo(piece, nl=False)
            headers = stream.headers
        typer.echo()
    finally:
        if pieces:
            # Also what Ctrl-C has cut short: it was read.
            conversation.turns.append({"role": "assistant", "content": "".join(pieces)})
        else:
            conversation.turns.pop()
    note = f"{num_tokens} tokens · first after {first_s:.2f} s · {time.perf_counter() - start:.2f} s"
    if prefilled := headers.get("x-tandem-prefill-worker"):
        note += f" · {prefilled} → {headers.get('x-tandem-decode-worker')}"
    return note

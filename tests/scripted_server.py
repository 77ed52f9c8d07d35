"""A server of OpenAI's API that answers from a script: what commands and benchmarks talk to in tests."""

import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from cluster.api_keys import ApiKeys
from cluster.openai.authentication import Authentication


@dataclass
class ScriptedServer:
    """What it answers, and what it was asked."""

    pieces: list[str] = field(default_factory=lambda: ["The capital", " is", " Paris."])
    token_ids: list[list[int]] | None = None  # of each piece, where the server lists them
    error: tuple[int, str] | None = None  # instead of an answer
    breaks_after: int | None = None  # pieces; then the stream ends without [DONE]
    ready: bool = True
    metrics: str | None = None  # None: there are none
    requests: list[dict[str, Any]] = field(default_factory=list)
    base_url: str = ""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"data": [{"id": "scripted", "object": "model"}]}

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=200 if self.ready else 503)

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(status_code=404) if self.metrics is None else PlainTextResponse(self.metrics)

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            return await self._answer(request, lambda piece: {"delta": {"content": piece}})

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            return await self._answer(request, lambda piece: {"text": piece})

        return app

    async def _answer(self, request: Request, choice: Any) -> Response:
        self.requests.append(await request.json())
        if self.error is not None:
            status, message = self.error
            return JSONResponse({"error": {"message": message}}, status_code=status)
        headers = {"x-tandem-prefill-worker": "prefill-0", "x-tandem-decode-worker": "decode-0"}
        return StreamingResponse(self._events(choice), media_type="text/event-stream", headers=headers)

    async def _events(self, choice: Any) -> AsyncIterator[str]:
        yield ": a comment, as servers send to keep a connection\n\n"
        for i, piece in enumerate(self.pieces[: self.breaks_after]):
            listed = {} if self.token_ids is None else {"token_ids": self.token_ids[i]}
            yield f"data: {json.dumps({'choices': [{'index': 0, **choice(piece), **listed}]})}\n\n"
        if self.breaks_after is None:
            usage = {
                "prompt_tokens": 10,
                "completion_tokens": len(self.pieces),
                "prompt_tokens_details": {"cached_tokens": 4},
            }
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


class _Thread(uvicorn.Server):
    """A server in a thread; signals are left to the test's process."""

    def install_signal_handlers(self) -> None:
        return


@contextmanager
def scripted_server(
    *, api_key: str | None = None, tls_files: tuple[str, str] | None = None
) -> Iterator[ScriptedServer]:
    """One that runs, in a thread.

    Args:
        api_key: it wants.
        tls_files: certificate and key; None: it speaks plain HTTP.
    """
    scripted = ScriptedServer()
    listener = socket.create_server(("127.0.0.1", 0))
    scripted.base_url = f"{'https' if tls_files else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    app = Authentication(scripted.app(), None if api_key is None else ApiKeys([api_key]))
    cert_file, key_file = tls_files or (None, None)
    uvicorn_server = _Thread(
        uvicorn.Config(
            app,
            log_level="error",
            lifespan="off",
            ssl_certfile=cert_file,
            ssl_keyfile=key_file,
            timeout_graceful_shutdown=5,
        )
    )
    # The listener takes connections from its birth: nobody has to wait for the thread.
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield scripted
    finally:
        uvicorn_server.should_exit = True
        thread.join()
        listener.close()

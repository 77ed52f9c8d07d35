"""The gateway's front doors over a fake generator, in this process: no socket, no worker, the embedded tokenizer."""

import functools
import json
from collections.abc import Callable
from typing import Any

import httpx
from prometheus_client import generate_latest
from starlette.types import ASGIApp

from cluster.metrics import GatewayMetrics
from cluster.openai.app import create_app
from cluster.openai.server import ApiServer
from cluster.scrape import ClusterScrape
from cluster.text.chat_template import ChatTemplate
from cluster.text_generator import TextGenerator
from engine.model.locate import EMBEDDED_MODEL, resolve_model
from engine.tokenizer.tokenizer import Tokenizer
from fake_generator import FakeGenerator

MODEL = "fake"


@functools.cache
def embedded_tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model(EMBEDDED_MODEL))


def ticking_clock(step: float = 0.125) -> Callable[[], float]:
    """Every look at it is `step` seconds later."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += step
        return now

    return clock


class Api:
    """An application and a client of it."""

    def __init__(
        self, generator: FakeGenerator | None = None, tokenizer: Tokenizer | None = None, **server: Any
    ) -> None:
        self.generator = generator or FakeGenerator()
        self.tokenizer = tokenizer or embedded_tokenizer()
        self.metrics = GatewayMetrics(
            MODEL, stats=lambda: self.generator.stats, workers=lambda: self.generator.workers()
        )
        self.text = TextGenerator(self.generator, self.tokenizer, self.metrics, clock=ticking_clock())
        source = self.tokenizer.chat_template or embedded_tokenizer().chat_template
        assert source is not None
        values: dict[str, Any] = {
            "text": self.text,
            "scrape": ClusterScrape(self.metrics.registry),
            "version": "1.2.3",
            "created": 1_700_000_000,
            "chat_template": ChatTemplate(source, self.tokenizer.special.names),
            "wall_clock": lambda: 1_800_000_000.5,
        } | server
        self.app: ASGIApp = create_app(ApiServer(**values))
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://gateway")

    def server_metrics(self) -> str:
        """The gateway's own metrics, as Prometheus text."""
        return generate_latest(self.metrics.registry).decode()

    async def post(self, path: str, body: Any = None, *, raw: bytes | None = None, **kwargs: Any) -> httpx.Response:
        content = raw if raw is not None else json.dumps(body).encode()
        return await self.http.post(path, content=content, **kwargs)

    async def complete(self, prompt: Any = "Once upon a time", **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    async def chat(self, messages: Any = "Hello", **fields: Any) -> httpx.Response:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})


def says(text: str) -> FakeGenerator:
    """A generator that says this text, whatever is asked, and then ends the sequence."""
    tokenizer = embedded_tokenizer()
    (eos,) = tokenizer.eos_token_ids
    tokens = [*tokenizer.encode(text), eos]
    return FakeGenerator(script=lambda request: tokens)


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a whole stream, whose framing is checked."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = reply.text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: {") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def streamed_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def finish_reasons(chunks: list[dict[str, Any]], index: int = 0) -> list[str]:
    return [
        choice["finish_reason"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index and choice["finish_reason"]
    ]


def error_of(reply: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a reply, whose form is checked."""
    assert reply.status_code == status, f"{reply.status_code} {reply.text}"
    body = reply.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error

"""From a call's text deltas to what goes over the connection: one JSON object, or server-sent events.

Completions and chat differ only in the shape of their objects (`Shape`). Everything that both share is here: the head
of the objects, usage, the order of a stream's events, errors in the middle of it, and the headers that tell which
workers served the call. A stream's status and headers wait for its first delta, so that a request which cannot be
started is answered by an error with its own status.

What is large, as log-probabilities of a long prompt are, is made and written in a thread, while other calls go on.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from cluster.errors import GenerationError
from cluster.openai.disconnect import ClientDisconnected, until_disconnect
from cluster.openai.encoding import encode, encode_large
from cluster.openai.error_replies import error_object_of
from cluster.openai.reply_headers import reply_headers
from cluster.openai.request_fields import UsageChunks
from cluster.openai.usage import Usage
from cluster.text_generator import TextDelta, TextGenerator
from cluster.text_request import PlannedText

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it is for the server's log

Json = dict[str, Any]

# What is larger (see `Shape.size`) takes some milliseconds, for which other calls' tokens would have to wait.
_INLINE_SIZE = 2048


class Shape(Protocol):
    """The objects of one endpoint, for one call."""

    chunk_object: str
    whole_object: str

    def chunk_choices(self, delta: TextDelta) -> Iterator[Json]:
        """What a delta adds to a stream: one choice for each event; nothing if there is nothing to show."""
        ...

    def whole_choice(self, delta: TextDelta) -> Json:
        """A choice that was not streamed; `delta` is all of its deltas in one."""
        ...

    def size(self, delta: TextDelta) -> int:
        """About how many log-probabilities and token ids a delta will tell, if it is what comes next of its choice."""
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """What all objects of a call begin with."""

    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str

    def json(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class Call:
    """A planned call: runs it, and answers its request."""

    def __init__(
        self,
        text: TextGenerator,
        planned: Sequence[PlannedText],
        head: Head,
        shape: Shape,
        *,
        usage_chunks: UsageChunks = UsageChunks.NONE,
    ) -> None:
        self._text = text
        self._planned = planned
        self._head = head
        self._shape = shape
        self._usage = Usage(planned)
        self._usage_chunks = usage_chunks

    async def whole(self, request: Request) -> Response:
        """One object with all choices."""
        try:
            deltas = await until_disconnect(request.receive, self._collect())
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if sum(map(self._shape.size, deltas)) <= _INLINE_SIZE:
            body = encode(self._whole(deltas)).encode()
        else:
            body = await asyncio.to_thread(lambda: encode_large(self._whole(deltas)))
        return Response(body, media_type="application/json", headers=self.headers(deltas[0]))

    def stream(self) -> Response:
        """Server-sent events; the response runs the call."""
        return _EventStream(self)

    async def events(self) -> AsyncGenerator[tuple[TextDelta, bytes], None]:
        """Every delta with each of the events that it makes, as JSON."""
        async with aclosing(self._text.run(self._planned)) as deltas:
            async for delta in deltas:
                self._usage.add(delta)
                if self._shape.size(delta) <= _INLINE_SIZE:
                    for choice in self._shape.chunk_choices(delta):
                        yield delta, encode(self._chunk([choice])).encode()
                else:
                    for event in await asyncio.to_thread(self._large_events, delta):
                        yield delta, event

    def usage_event(self) -> bytes | None:
        """The event after the last choice's end, if it was asked for."""
        return None if self._usage_chunks is UsageChunks.NONE else encode(self._chunk([])).encode()

    def headers(self, delta: TextDelta) -> dict[str, str]:
        """Of the reply; `delta` is of the first choice, or the first of all."""
        return reply_headers(delta, self._usage.cached_tokens)

    def _whole(self, deltas: Sequence[TextDelta]) -> Json:
        body = self._head.json(self._shape.whole_object)
        body["choices"] = [self._shape.whole_choice(delta) for delta in deltas]
        body["usage"] = self._usage.json()
        return body

    def _large_events(self, delta: TextDelta) -> list[bytes]:
        return [encode_large(self._chunk([choice])) for choice in self._shape.chunk_choices(delta)]

    def _chunk(self, choices: list[Json]) -> Json:
        event = self._head.json(self._shape.chunk_object)
        event["choices"] = choices
        if self._usage_chunks is not UsageChunks.NONE:
            tells = not choices or self._usage_chunks is UsageChunks.ALL
            event["usage"] = self._usage.json() if tells else None
        return event

    async def _collect(self) -> list[TextDelta]:
        by_index: dict[int, list[TextDelta]] = {}
        async with aclosing(self._text.run(self._planned)) as deltas:
            async for delta in deltas:
                self._usage.add(delta)
                by_index.setdefault(delta.index, []).append(delta)
        return [joined(by_index[index]) for index in sorted(by_index)]


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """All deltas of one choice as one."""
    last = deltas[-1]
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        prompt_logprobs=deltas[0].prompt_logprobs,
    )


class _EventStream(Response):
    """Runs a call while its client reads.

    An error before the first event is raised, so that it is answered like any other; after it, it is an event.
    """

    media_type = "text/event-stream"

    def __init__(self, call: Call) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        # A response without a body announces a length of 0; a stream has none.
        del self.headers["content-length"]
        self._call = call
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientDisconnected:
            return

    async def _send_all(self, send: Send) -> None:
        try:
            async with aclosing(self._call.events()) as events:
                async for delta, event in events:
                    await self._start(send, delta)
                    await self._send(send, event)
            if (usage := self._call.usage_event()) is not None:
                await self._send(send, usage)
        except Exception as exc:
            if not self._is_started:
                raise
            await self._send(send, encode(error_object_of(exc)).encode())
            await self._end(send)
            if not isinstance(exc, GenerationError):
                raise  # the server writes the traceback to its log
            return
        await self._end(send)

    async def _start(self, send: Send, delta: TextDelta) -> None:
        if self._is_started:
            return
        self._is_started = True
        self.headers.update(self._call.headers(delta))
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _send(self, send: Send, event: bytes) -> None:
        await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})

    async def _end(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

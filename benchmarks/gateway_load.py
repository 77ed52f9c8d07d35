"""Requests one after the other on each of some lanes, through the gateway's HTTP or straight to a worker's gRPC.

Both clients are as thin as they can be (bytes of HTTP written and read as they are; one session for all lanes, as a
gateway has it), so that what is measured is not the client.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol, Self
from urllib.parse import urlsplit

from cluster.channel import ChannelConfig, open_channel
from engine.sampling_params import SamplingParams
from kvtransfer.sampling_wire import sampling_params_to_wire
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds since the request was sent."""

    first_s: float
    end_s: float
    num_tokens: int


class Client(Protocol):
    """Sends requests that end with their last token and not before."""

    async def ask(self, lane: int, prompt: Sequence[int], num_tokens: int) -> Answer:
        """Called for one request of a lane at a time."""
        ...


class AnswerBroken(Exception):
    """What came is no answer; the message has its beginning."""


_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


class HttpClient:
    """Streams from an OpenAI server, over a connection a lane. An async context manager."""

    def __init__(self, base_url: str, model: str) -> None:
        self._url = urlsplit(base_url)
        self._model = model
        self._lanes: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for lane in list(self._lanes):
            await self._close(lane)

    async def _close(self, lane: int) -> None:
        _, writer = self._lanes.pop(lane)
        writer.close()
        await writer.wait_closed()

    async def ask(self, lane: int, prompt: Sequence[int], num_tokens: int) -> Answer:
        """Implements `Client`.

        Raises:
            AnswerBroken: not the stream of so many tokens.
        """
        if lane in self._lanes and self._lanes[lane][0].at_eof():
            await self._close(lane)  # as the server has, since it was idle for some seconds
        if lane not in self._lanes:
            self._lanes[lane] = await asyncio.open_connection(self._url.hostname, self._url.port)
        reader, writer = self._lanes[lane]
        began = time.perf_counter()
        writer.write(self._request(prompt, num_tokens))
        first_s: float | None = None
        received = bytearray()
        while not received.endswith(_END):
            part = await reader.read(1 << 16)
            received += part
            if not part or not received.startswith(b"HTTP/1.1 200 "):
                raise AnswerBroken(received[:300].decode(errors="replace"))
            if first_s is None and b"data: {" in received:
                first_s = time.perf_counter() - began
        end_s = time.perf_counter() - began
        got = received.count(b'"token_ids":[')
        if first_s is None or got != num_tokens:
            raise AnswerBroken(f"{got} tokens instead of {num_tokens}: {received[:300].decode(errors='replace')}")
        return Answer(first_s, end_s, got)

    def _request(self, prompt: Sequence[int], num_tokens: int) -> bytes:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                # Each event then says what it brings, also where a token is no whole character yet.
                "return_token_ids": True,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._url.netloc}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class WorkerClient:
    """A session with a decode worker, as a gateway has it. An async context manager."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._serial = count()
        self._outputs: dict[str, asyncio.Queue[pb.RequestOutput | None]] = {}  # None: nothing will come any more
        self._outgoing: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self._address, ChannelConfig())
        stub: worker_pb2_grpc.WorkerStub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        self._call = stub.Session()
        # One writer: gRPC takes one message of a stream at a time.
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    async def ask(self, lane: int, prompt: Sequence[int], num_tokens: int) -> Answer:
        """Implements `Client`.

        Raises:
            AnswerBroken: the session has ended, or the answer has not so many tokens.
        """
        request_id = str(next(self._serial))
        outputs = self._outputs[request_id] = asyncio.Queue()
        began = time.perf_counter()
        submit = pb.Submit(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=sampling_params_to_wire(SamplingParams(max_tokens=num_tokens, temperature=0.0)),
            plan=pb.Plan(),
        )
        self._outgoing.put_nowait(pb.SessionRequest(submit=submit))
        first_s: float | None = None
        got, is_over = 0, False
        while not is_over:
            output = await outputs.get()
            if output is None:
                raise AnswerBroken("the worker has ended the session")
            first_s = first_s or time.perf_counter() - began
            got += len(output.token_ids)
            is_over = bool(output.finish_reason)
        del self._outputs[request_id]
        assert first_s is not None
        if got != num_tokens:
            raise AnswerBroken(f"{got} tokens instead of {num_tokens}")
        return Answer(first_s, time.perf_counter() - began, got)

    async def _read(self) -> None:
        try:
            async for response in self._call:
                if response.WhichOneof("message") == "refused":
                    self._outputs[response.refused.request_id].put_nowait(None)
                for output in response.step.outputs:
                    self._outputs[output.request_id].put_nowait(output)
        finally:
            for outputs in self._outputs.values():
                outputs.put_nowait(None)

    async def _write(self) -> None:
        while True:
            await self._call.write(await self._outgoing.get())


async def run_lanes(
    client: Client, num_lanes: int, num_requests: int, prompt_len: int, num_tokens: int, seed: int
) -> tuple[list[Answer], float]:
    """All answers, and how many seconds they took together. No two prompts begin alike, nor of two seeds.

    Raises:
        AnswerBroken: one was.
    """
    numbers = iter(range(num_requests))
    answers: list[Answer] = []

    async def lane(number: int) -> None:
        for serial in numbers:
            prompt = [seed % 1000, serial // 1000, serial % 1000, *[7] * (prompt_len - 3)]
            answers.append(await client.ask(number, prompt, num_tokens))

    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as lanes:
            for number in range(num_lanes):
                lanes.create_task(lane(number))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors  # what broke the first one ended the others
    return answers, time.perf_counter() - began

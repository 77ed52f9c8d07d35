"""A client that leaves costs nothing any more, at once."""

import asyncio
import json
from typing import Any

import pytest

from cluster.call_record import CallRecord, CallRecorder
from fake_generator import FakeGenerator
from gateway_api import MODEL, Api


class Connection:
    """An ASGI connection whose client leaves when it is told to."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [],
            "client": ("127.0.0.1", 1),
            "server": ("gateway", 80),
        }
        self._body: bytes | None = json.dumps(body).encode()
        self.left = asyncio.Event()
        self.sent: asyncio.Queue[Any] = asyncio.Queue()

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.sent.put(message)


BODIES = {
    "/v1/completions": {"model": MODEL, "prompt": "Hi", "max_tokens": 1000},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1000},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_client_that_leaves_before_the_first_token_closes_its_sequences(path: str, stream: bool, n: int) -> None:
    generator = FakeGenerator()
    generator.gate = asyncio.Semaphore(0)
    api = Api(generator)
    connection = Connection(path, {**BODIES[path], "stream": stream, "n": n})
    serving = asyncio.create_task(api.app(connection.scope, connection.receive, connection.send))
    await generator.started()
    assert gauges(api) == (0, n)
    connection.left.set()
    async with asyncio.timeout(10):
        await serving
    assert sorted(generator.closed) == sorted(request.request_id for request in generator.requests)
    assert gauges(api) == (0, 0)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 3])
async def test_client_that_leaves_in_the_middle_of_a_stream_closes_its_sequences(path: str, n: int) -> None:
    generator = FakeGenerator()
    generator.gate = asyncio.Semaphore(2 * n)
    api = Api(generator)
    connection = Connection(path, {**BODIES[path], "stream": True, "n": n})
    serving = asyncio.create_task(api.app(connection.scope, connection.receive, connection.send))
    async with asyncio.timeout(10):
        for _ in range(2):  # the head and the first event
            await connection.sent.get()
        connection.left.set()
        await serving
    assert sorted(generator.closed) == sorted(request.request_id for request in generator.requests)
    assert generator.finished == []
    assert gauges(api) == (0, 0)
    assert 'tandem_request_success_total{finished_reason="abort"' in api.server_metrics()


@pytest.mark.parametrize("path", [*BODIES, "/tokenize", "/detokenize"])
async def test_client_that_leaves_while_it_sends_its_request_is_no_fault_of_ours(path: str) -> None:
    records: list[CallRecord] = []
    api = Api(calls=CallRecorder([records.append]))
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    connection = Connection(path, {})

    async def receive() -> dict[str, Any]:
        return next(messages)

    await api.app(connection.scope, receive, connection.send)
    (record,) = records
    assert (record.status, record.client_gone, record.error) == (499, True, None)


async def test_client_that_does_not_read_stalls_only_itself() -> None:
    generator = FakeGenerator()
    api = Api(generator)
    connection = Connection("/v1/completions", {**BODIES["/v1/completions"], "stream": True})
    connection.sent = asyncio.Queue(maxsize=3)
    serving = asyncio.create_task(api.app(connection.scope, connection.receive, connection.send))
    await generator.started()
    reply = await api.complete("Hi", max_tokens=5)
    assert reply.status_code == 200
    assert connection.sent.qsize() <= 3
    connection.left.set()
    async with asyncio.timeout(10):
        await serving
    assert len(generator.closed) == 2


def gauges(api: Api) -> tuple[float, float]:
    """Running and waiting."""
    values = {
        sample.name: sample.value
        for family in api.metrics.registry.collect()
        for sample in family.samples
        if sample.name in ("tandem_num_requests_running", "tandem_num_requests_waiting")
    }
    return values["tandem_num_requests_running"], values["tandem_num_requests_waiting"]

"""The gateway over real workers whose tokens are hashes of what their pools hold: sockets, threads, everything."""

import asyncio
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.config import ClusterConfig
from cluster.gateway import Gateway
from cluster.http_server import listen
from cluster.membership import Membership
from engine.hash_executor import expected_tokens
from engine.sampling_params import SamplingParams
from hash_gateway import MODEL, VOCAB_SIZE, running
from tandem.v1 import generation_pb2, generation_pb2_grpc

PROMPT = list(range(100, 140))
CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)


def http(gateway: Gateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.base_url, timeout=30, trust_env=False)


def body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}


async def test_tokens_over_http_and_grpc_are_the_oracles_and_headers_name_the_workers() -> None:
    expected = expected_tokens(PROMPT, SamplingParams(max_tokens=8, temperature=0), VOCAB_SIZE)
    async with running() as gateway, http(gateway) as client:
        reply = await client.post("/v1/completions", json=body(return_token_ids=True))
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["token_ids"] == expected
        assert (reply.headers["x-tandem-prefill-worker"], reply.headers["x-tandem-decode-worker"]) == ("p0", "d0")
        async with client.stream("POST", "/v1/completions", json=body(stream=True)) as stream:
            text = (await stream.aread()).decode()
        assert text.endswith("data: [DONE]\n\n")

        address = f"127.0.0.1:{gateway.grpc_port}"
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            request = generation_pb2.GenerateRequest(tokenized=generation_pb2.TokenizedInput(input_ids=PROMPT))
            request.sampling_params.max_tokens = 8
            request.sampling_params.temperature = 0
            request.sampling_params.ignore_eos = True
            stub = generation_pb2_grpc.GenerationStub(channel)
            (response,) = [r async for r in stub.Generate(request)]
            assert list(response.complete.output_ids) == expected
            assert response.complete.text == reply.json()["choices"][0]["text"]

            checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert checked.status == health_pb2.HealthCheckResponse.SERVING
            listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await listing.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            services = (await listing.read()).list_services_response.service
            assert "tandem.v1.Generation" in {service.name for service in services}
            await listing.done_writing()


async def test_origins_that_are_allowed_are_the_configurations() -> None:
    async with running(allowed_origins="https://chat.example") as gateway, http(gateway) as client:
        allowed = [
            (await client.get("/health", headers={"origin": origin})).headers.get("access-control-allow-origin")
            for origin in ("https://chat.example", "https://other.example")
        ]
        assert allowed == ["https://chat.example", None]


async def test_metrics_of_all_processes_are_in_one_scrape() -> None:
    async with running() as gateway, http(gateway) as client:
        assert (await client.post("/v1/completions", json=body())).status_code == 200
        text = (await client.get("/metrics")).text
        for role in ("gateway", "prefill", "decode"):
            assert f'role="{role}"' in text
        assert "tandem_kv_blocks{" in text
        assert text.count("# TYPE tandem_num_requests_running gauge") == 1
        targets = (await client.get("/metrics/targets")).json()
        assert {target["labels"]["worker_id"] for target in targets} == {"p0", "d0"}
        assert (await client.get("/health")).status_code == 200


async def test_client_that_leaves_costs_the_workers_nothing() -> None:
    async with running() as gateway:
        async with (
            http(gateway) as client,
            client.stream("POST", "/v1/completions", json=body(stream=True, max_tokens=200, n=3)) as stream,
        ):
            await anext(stream.aiter_bytes())
        async with asyncio.timeout(10):
            while gateway.generator.stats.num_active:
                await asyncio.sleep(0)
        async with http(gateway) as client:
            text = (await client.get("/metrics", params={"scope": "gateway"})).text
        (count,) = re.findall(r'^tandem_request_success_total\{finished_reason="abort",.*\} (.+)$', text, re.M)
        assert float(count) == 3


async def test_requests_in_flight_end_before_a_stopping_gateway_does() -> None:
    async with running() as gateway, http(gateway) as client:
        request = asyncio.create_task(client.post("/v1/completions", json=body(max_tokens=100)))
        async with asyncio.timeout(10):
            while not gateway.generator.stats.num_active:
                await asyncio.sleep(0)
        await gateway.stop()
        assert (await request).json()["usage"]["completion_tokens"] == 100
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
        await gateway.stop()


async def test_port_in_use_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        gateway = Gateway(ClusterConfig(port=port), Membership())
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            await gateway.start()


async def test_small_replies_are_sent_without_waiting_for_acknowledgements() -> None:
    no_delay: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        no_delay.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listen("127.0.0.1", 0)
    async with await asyncio.start_server(accept, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await no_delay
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 400_000,
        b"GET /health HTTP/1.1\r\nx: " + b"a" * 400_000,
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 100_000,
    ],
    ids=["url", "header", "headers"],
)
async def test_head_without_an_end_is_refused_before_it_fills_the_memory(head: bytes) -> None:
    async with running() as gateway, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.http_port)
        with suppress(ConnectionError):  # it is closed while this is still being written
            for start in range(0, len(head), 10_000):
                writer.write(head[start : start + 10_000])
                await writer.drain()
        with suppress(ConnectionError):
            assert (await reader.read()).split(b"\r\n")[0] in (
                b"HTTP/1.1 431 Request Header Fields Too Large",
                b"",  # lost, as what was written after the end is answered by a reset
            )
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        # A long head that ends, and a body longer than any head, are served as ever.
        async with http(gateway) as client:
            assert (await client.get("/health", headers={"x-long": "a" * 40_000})).status_code == 200
            assert (await client.post("/v1/completions", json=body(user="x" * 300_000))).status_code == 200


def test_gateway_process_loads_neither_torch_nor_numba() -> None:
    root = Path(__file__).parents[2]
    code = (
        "import sys, cluster.gateway; from engine.tokenizer.tokenizer import Tokenizer; "
        "from engine.model.locate import *; Tokenizer.load(resolve_model(EMBEDDED_MODEL)); "
        "sys.exit(' '.join({'torch', 'numba', 'ray', 'transformers'} & set(sys.modules)) or 0)"
    )
    path = f"{root}:{root / 'proto'}"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

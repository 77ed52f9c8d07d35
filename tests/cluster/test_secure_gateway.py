"""A gateway with keys, certificates and limits, over workers that want certificates: all by sockets."""

import json
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from certificates import Authority
from cluster.channel import ChannelConfig
from cluster.config import load_config
from cluster.gateway import Gateway
from cluster.membership import Membership
from cluster.router import RouterConfig
from cluster.tls import internal_tls
from cluster.worker_link import LinkConfig
from decode_worker import DecodeWorker
from engine.config import EngineConfig
from engine.hash_executor import expected_tokens
from engine.sampling_params import SamplingParams
from prefill_worker import PrefillWorker
from tandem.v1 import generation_pb2, generation_pb2_grpc
from worker.config import DEFAULT_SERVER_NAME, WorkerConfig

MODEL = "hash-model"
PROMPT = list(range(100, 140))
PATIENCE_S = 60.0
KEYS = ("sesame-1", "sesame-2")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture
def secure(authority: Authority, tmp_path: Path) -> dict[str, Any]:
    """Everything that there is."""
    keys = tmp_path / "keys"
    keys.write_text(f"# for tests\n{KEYS[1]}\n")
    (cert_file, key_file), (inside_cert, inside_key) = authority.sign("127.0.0.1"), authority.sign(DEFAULT_SERVER_NAME)
    return {
        "api_key": [KEYS[0]],
        "api_keys_file": str(keys),
        "tls_cert_file": cert_file,
        "tls_key_file": key_file,
        "internal_ca_file": authority.file,
        "internal_cert_file": inside_cert,
        "internal_key_file": inside_key,
    }


@asynccontextmanager
async def running(**fields: Any) -> AsyncIterator[Gateway]:
    config = load_config(None, {"port": 0, "shutdown_timeout_s": 2.0, **fields})
    engine = EngineConfig(num_blocks=64, max_model_len=256, max_num_batched_tokens=64)
    internal = {name: value for name, value in fields.items() if name.startswith("internal_")}
    workers = [
        kind(WorkerConfig(engine=engine, worker_id=name, executor="hash", served_model_name=MODEL, **internal))
        for kind, name in ((PrefillWorker, "p0"), (DecodeWorker, "d0"))
    ]
    link = LinkConfig(channel=ChannelConfig(tls=internal_tls(config)))
    membership = Membership(RouterConfig(max_local_prefill_tokens=0), link)
    gateway = Gateway(config, membership)
    try:
        for worker in workers:
            membership.add_worker(await worker.start())
        await membership.wait_ready(prefill_workers=1)
        await gateway.start()
        yield gateway
    finally:
        await gateway.stop()
        await membership.close()
        for worker in workers:
            await worker.stop()


def http(gateway: Gateway, authority: Authority | None = None, key: str | None = None) -> httpx.AsyncClient:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    verify = True if authority is None else ssl.create_default_context(cafile=authority.file)
    return httpx.AsyncClient(
        base_url=gateway.base_url, timeout=PATIENCE_S, trust_env=False, headers=headers, verify=verify
    )


def channel(gateway: Gateway, authority: Authority | None = None) -> grpc.aio.Channel:
    address, options = f"127.0.0.1:{gateway.grpc_port}", (("grpc.enable_http_proxy", 0),)
    if authority is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(Path(authority.file).read_bytes())
    return grpc.aio.secure_channel(address, credentials, options=options)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}


def generate_request(num_tokens: int = len(PROMPT)) -> generation_pb2.GenerateRequest:
    ids = [PROMPT[i % len(PROMPT)] for i in range(num_tokens)]
    request = generation_pb2.GenerateRequest(tokenized=generation_pb2.TokenizedInput(input_ids=ids))
    request.sampling_params.max_tokens = 8
    request.sampling_params.temperature = 0
    request.sampling_params.ignore_eos = True
    return request


async def test_tokens_over_tls_with_keys_are_the_oracles_on_both_doors(
    secure: dict[str, Any], authority: Authority
) -> None:
    expected = expected_tokens(PROMPT, SamplingParams(max_tokens=8, temperature=0), 1000)
    async with running(**secure) as gateway:
        assert gateway.base_url.startswith("https://127.0.0.1:")
        for key in KEYS:
            async with http(gateway, authority, key) as client:
                reply = await client.post("/v1/completions", json=body(return_token_ids=True))
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["token_ids"] == expected
            # Through the prefill worker: its blocks came from one worker to the other under TLS.
            assert (reply.headers["x-tandem-prefill-worker"], reply.headers["x-tandem-decode-worker"]) == ("p0", "d0")
            async with channel(gateway, authority) as secured:
                stub = generation_pb2_grpc.GenerationStub(secured)
                (response,) = [r async for r in stub.Generate(generate_request(), metadata=bearer(key))]
            assert list(response.complete.output_ids) == expected


async def test_plain_clients_of_a_gateway_with_tls_are_refused(secure: dict[str, Any]) -> None:
    async with running(**secure) as gateway:
        async with http(gateway, key=KEYS[0]) as client:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await client.get("/health")
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(gateway.base_url.replace("https", "http") + "/health")
        async with channel(gateway) as plain:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health_pb2_grpc.HealthStub(plain).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_without_a_key_there_is_health_and_nothing_else() -> None:
    async with running(api_key=KEYS) as gateway:
        async with http(gateway) as client:
            assert (await client.get("/health")).status_code == 200
            for path in (
                "/v1/models",
                "/metrics",
                "/metrics/targets",
                "/docs",
                "/openapi.json",
                "/version",
                "/nothing",
            ):
                reply = await client.get(path)
                assert reply.status_code == 401, path
                error = reply.json()["error"]
                assert (error["type"], error["param"], error["code"]) == (
                    "invalid_request_error", None, "invalid_api_key",
                )  # fmt: skip
                assert reply.headers["www-authenticate"] == "Bearer"
                assert reply.headers["x-request-id"]
        async with http(gateway, key="sesame-3") as client:
            # Before its body, which would be refused by another status.
            reply = await client.post("/v1/completions", content=b"{")
            assert reply.status_code == 401
            assert "sesame-3" not in reply.text
        async with channel(gateway) as plain:
            checked = await health_pb2_grpc.HealthStub(plain).Check(health_pb2.HealthCheckRequest())
            assert checked.status == health_pb2.HealthCheckResponse.SERVING
            stub = generation_pb2_grpc.GenerationStub(plain)
            for metadata in ((), bearer("sesame-3")):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), metadata=metadata)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in stub.Generate(generate_request(), metadata=metadata):
                        pass
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                # A stream whose client says nothing is refused as well.
                listing = reflection_pb2_grpc.ServerReflectionStub(plain).ServerReflectionInfo(
                    metadata=metadata, timeout=PATIENCE_S
                )
                assert await listing.code() is grpc.StatusCode.UNAUTHENTICATED
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await plain.unary_unary("/no.such.Service/Method")(b"", metadata=metadata)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            listing = reflection_pb2_grpc.ServerReflectionStub(plain).ServerReflectionInfo(metadata=bearer(KEYS[1]))
            await listing.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            assert (await listing.read()).list_services_response.service
            await listing.done_writing()


async def test_limits_are_the_configurations() -> None:
    async with running(max_body_bytes=1000, max_concurrent_requests=2) as gateway:
        async with http(gateway) as client:
            assert (await client.post("/v1/completions", json=body())).status_code == 200
            reply = await client.post("/v1/completions", json=body(user="x" * 1000))
            assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
            reply = await client.post("/v1/completions", json=body(n=3))
            assert reply.status_code == 400
            assert "at most 2 choices, not 3" in reply.json()["error"]["message"]
        async with channel(gateway) as plain:
            stub = generation_pb2_grpc.GenerationStub(plain)
            assert [r async for r in stub.Generate(generate_request())]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(generate_request(num_tokens=2000)):
                    pass
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            # The server is as before.
            assert [r async for r in stub.Generate(generate_request())]


async def test_every_call_has_a_line_with_its_id_and_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(api_key=KEYS) as gateway:
        async with http(gateway, key=KEYS[0]) as client:
            await client.post("/v1/completions", json=body(), headers={"x-request-id": "over-http"})
            # No token of its text is one of this model's.
            refused_body = body(prompt="open the gate")
            await client.post("/v1/completions", json=refused_body, headers={"x-request-id": "refused-http"})
            await client.get("/v1/models", params={"api_key": KEYS[0]}, headers={"x-request-id": "models"})
        async with http(gateway) as client:
            await client.get("/v1/models", headers={"x-request-id": "nobody"})
        async with channel(gateway) as plain:
            stub = generation_pb2_grpc.GenerationStub(plain)
            metadata = (*bearer(KEYS[1]), ("x-request-id", "over-grpc"))
            assert [r async for r in stub.Generate(generate_request(), metadata=metadata)]
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetLoads(generation_pb2.GetLoadsRequest(), metadata=(("x-request-id", "keyless"),))
            refused = generation_pb2.GenerateRequest(model="another", text="open the gate")
            metadata = (*bearer(KEYS[1]), ("x-request-id", "refused"))
            with pytest.raises(grpc.aio.AioRpcError):
                assert [r async for r in stub.Generate(refused, metadata=metadata)]
    lines = {record.request_id: record for record in caplog.records if record.name == "cluster.access_log"}
    ends = {name: (line.fields["method"], line.fields["path"], line.fields["status"]) for name, line in lines.items()}
    assert ends == {
        "over-http": ("POST", "/v1/completions", 200),
        "refused-http": ("POST", "/v1/completions", 400),
        "models": ("GET", "/v1/models", 200),
        "nobody": ("GET", "/v1/models", 401),
        "over-grpc": ("POST", "/tandem.v1.Generation/Generate", "OK"),
        "keyless": ("POST", "/tandem.v1.Generation/GetLoads", "UNAUTHENTICATED"),
        "refused": ("POST", "/tandem.v1.Generation/Generate", "NOT_FOUND"),
    }
    for name in ("over-http", "over-grpc"):
        fields = lines[name].fields
        assert fields["completion_tokens"] == 8
        assert (fields["prefill_worker"], fields["decode_worker"], fields["client_gone"]) == ("p0", "d0", False)
    assert lines["over-grpc"].fields["prompt_tokens"] == len(PROMPT)
    assert lines["refused-http"].fields["error"] == "InvalidRequest"
    said = [record.getMessage() for record in caplog.records if record.name != "httpx"]  # which is the client's
    everything = json.dumps([said, [line.fields for line in lines.values()]])
    assert not any(secret in everything for secret in (*KEYS, "open the gate"))

"""Where traces are sent: nowhere, unless an endpoint is set; and an endpoint that does not answer keeps nobody."""

import asyncio
import builtins
import sys
import threading
from types import ModuleType
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider

from cluster.call_record import CallRecorder
from cluster.config import ConfigError, load_config
from cluster.tracing import CallTracer, open_tracer
from gateway_api import Api


def test_without_an_endpoint_opentelemetry_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    forbid_opentelemetry(monkeypatch)
    assert open_tracer(load_config()) is None


def test_missing_packages_are_named_by_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_opentelemetry(monkeypatch)
    with pytest.raises(ConfigError, match=r"otlp_endpoint: traces need the extra otel: pip install .*\[otel\]"):
        open_tracer(load_config(None, {"otlp_endpoint": "http://127.0.0.1:4317"}))


def forbid_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str, *args: Any, **kwargs: Any) -> ModuleType:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    real = builtins.__import__
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)


def test_endpoint_of_the_environment_is_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317")
    assert load_config().otlp_endpoint == "http://collector:4317"
    assert load_config(None, {"otlp_endpoint": "http://other:4317"}).otlp_endpoint == "http://other:4317"


def test_endpoint_that_does_not_answer_does_not_keep_the_gateway() -> None:
    given_up = threading.Event()

    class Stuck(TracerProvider):
        def shutdown(self) -> None:
            assert given_up.wait(timeout=60.0)

    CallTracer(Stuck(shutdown_on_exit=False), "fake", give_up=given_up.set).close(patience_s=0.0)
    assert given_up.is_set()


async def test_spans_reach_a_collector() -> None:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    received: asyncio.Queue[Any] = asyncio.Queue()

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        async def Export(self, request: Any, context: Any) -> Any:
            received.put_nowait(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        tracer = open_tracer(load_config(None, {"otlp_endpoint": f"http://127.0.0.1:{port}"}))
        assert tracer is not None
        calls = CallRecorder([tracer.record])
        assert (await Api(calls=calls).complete(max_tokens=1)).status_code == 200
        await asyncio.to_thread(tracer.close)  # sends what is left
        (of_resource,) = received.get_nowait().resource_spans
    finally:
        await server.stop(None)
    resource = {attribute.key: attribute.value.string_value for attribute in of_resource.resource.attributes}
    assert resource["service.name"] == "tandem"
    assert of_resource.scope_spans[0].spans[0].name == "POST /v1/completions"

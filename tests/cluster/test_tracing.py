"""Spans of calls, as OpenTelemetry's own exporter in memory gets them."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from cluster.call_context import CallContext
from cluster.call_record import CallRecord, CallRecorder, ChoiceEnd
from cluster.errors import InvalidRequest, WorkerLost
from cluster.generator import StageTimes
from cluster.grpc_calls import GrpcCalls
from cluster.service import GenerationService
from cluster.text_request import TextOptions
from cluster.tracing import CallTracer
from fake_generator import FakeGenerator
from gateway_api import Api, events
from generation_api import chatting, embedded_template, serving
from tandem.v1 import generation_pb2, generation_pb2_grpc

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SECOND = 10**9


class Spans:
    """A tracer, and what it has exported."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = CallTracer(provider, "fake")
        self.calls = CallRecorder([self.tracer.record])

    @property
    def servers(self) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.kind is SpanKind.SERVER]

    @property
    def server(self) -> ReadableSpan:
        (span,) = self.servers
        return span

    @property
    def stages(self) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.kind is not SpanKind.SERVER]


@pytest.fixture
def spans() -> Iterator[Spans]:
    spans = Spans()
    yield spans
    spans.tracer.close()


def call(path: str = "/v1/completions", **fields: Any) -> CallRecord:
    """One that came at 1000 s of the day and went at 1010 s."""
    values: dict[str, Any] = {
        "context": CallContext("r-1"), "transport": "http", "method": "POST", "path": path, "started_at": 100.0,
        "wall_offset": 900.0, "clock": lambda: 0.0, "ended_at": 110.0, "status": 200,
    }  # fmt: skip
    return CallRecord(**values | fields)


# --- over the front doors


async def test_completion_over_http_is_a_span_that_goes_on_the_clients_trace(spans: Spans) -> None:
    api = Api(calls=spans.calls)
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1", "x-request-id": "r-1"}
    reply = await api.post(
        "/v1/completions",
        {"model": "fake", "prompt": "The secret is", "max_tokens": 5, "temperature": 0.5, "seed": 3, "stop": ["zebra"]},
        headers=headers,
    )
    assert reply.status_code == 200, reply.text
    span, answer = spans.server, reply.json()
    assert span.name == "POST /v1/completions"
    assert span.context.trace_id == int(TRACE, 16)
    assert span.parent is not None
    assert span.parent.span_id == int(PARENT, 16)
    assert span.context.trace_state.get("vendor") == "1"
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.response.finish_reasons": (answer["choices"][0]["finish_reason"],),
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        "tandem.cached_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        "tandem.request_id": "r-1",
        "tandem.decode_worker": reply.headers["x-tandem-decode-worker"],
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert span.attributes is not None
    assert {name: span.attributes.get(name) for name in expected} == expected
    assert span.status.status_code is StatusCode.UNSET
    (event,) = span.events
    assert event.name == "first token"
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= event.timestamp <= span.end_time
    told = f"{span.to_json()}"
    assert not any(secret in told for secret in ("secret", "zebra", answer["choices"][0]["text"]))


async def test_streamed_chat_is_a_span_of_its_own_trace(spans: Spans) -> None:
    api = Api(calls=spans.calls)
    events(await api.chat("Hello", stream=True, max_tokens=4, n=2))
    span = spans.server
    assert span.parent is None
    assert span.attributes is not None
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert span.attributes["gen_ai.request.choice.count"] == 2
    assert len(span.attributes["gen_ai.response.finish_reasons"]) == 2  # type: ignore[arg-type]


async def test_calls_that_generate_nothing_are_no_spans(spans: Spans) -> None:
    api = Api(calls=spans.calls)
    for path in ("/v1/models", "/health", "/metrics", "/nothing"):
        await api.http.get(path)
    assert spans.servers == []


async def test_refused_request_is_no_error_of_the_servers_and_a_lost_worker_is(spans: Spans) -> None:
    api = Api(calls=spans.calls)
    assert (await api.complete(temperature=-1)).status_code == 400
    assert spans.server.status.status_code is StatusCode.UNSET
    assert spans.server.attributes is not None
    assert spans.server.attributes["error.type"] == "400"
    api = Api(FakeGenerator(fail=WorkerLost("d0 is gone")), calls=spans.calls)
    assert (await api.complete()).status_code == 503
    lost = spans.servers[1]
    assert (lost.status.status_code, lost.status.description) == (StatusCode.ERROR, "WorkerLost")


async def test_grpc_call_is_a_span_with_its_code(spans: Spans) -> None:
    api = Api()
    server = grpc.aio.server(interceptors=[GrpcCalls(spans.calls)])
    service = GenerationService(api.text, version="1", clock=lambda: 0.0, chat_template=None)
    generation_pb2_grpc.add_GenerationServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        address, options = f"127.0.0.1:{port}", (("grpc.enable_http_proxy", 0),)
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            request = generation_pb2.GenerateRequest(text="Once")
            request.sampling_params.max_tokens = 3
            metadata = (("traceparent", TRACEPARENT), ("x-request-id", "r-2"))
            assert [r async for r in stub.Generate(request, metadata=metadata)]
            refused = generation_pb2.GenerateRequest(text="Once", model="another")
            with pytest.raises(grpc.aio.AioRpcError):
                assert [r async for r in stub.Generate(refused)]
            await stub.GetServerInfo(generation_pb2.GetServerInfoRequest())
    finally:
        await server.stop(None)
    done, not_found = spans.servers
    assert done.name == "tandem.v1.Generation/Generate"
    assert done.context.trace_id == int(TRACE, 16)
    assert done.attributes is not None
    assert not_found.attributes is not None
    assert done.attributes["rpc.response.status_code"] == "OK"
    assert (done.attributes["rpc.service"], done.attributes["rpc.method"]) == ("tandem.v1.Generation", "Generate")
    assert (done.attributes["tandem.request_id"], done.attributes["gen_ai.usage.output_tokens"]) == ("r-2", 3)
    assert not_found.attributes["rpc.response.status_code"] == "NOT_FOUND"
    assert not_found.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("model", ["fake", "another"], ids=["served", "refused"])
async def test_conversation_over_grpc_is_a_chat(spans: Spans, model: str) -> None:
    asked = chatting(stream=False, max_tokens=1)
    asked.model = model
    async with serving(template=embedded_template(), interceptors=[GrpcCalls(spans.calls)]) as served:
        with nullcontext() if model == "fake" else pytest.raises(grpc.aio.AioRpcError):
            assert [response async for response in served.stub.Generate(asked)]
        assert (await served.stub.Tokenize(generation_pb2.TokenizeRequest(chat=asked.chat))).count
    assert spans.server.name == "tandem.v1.Generation/Generate"
    assert spans.server.attributes is not None
    assert spans.server.attributes["gen_ai.operation.name"] == "chat"


# --- spans out of records


def test_stages_are_reckoned_back_from_the_last_chunk(spans: Spans) -> None:
    stages = StageTimes(queued=0.5, prefill=2.0, transfer=0.25, decode=4.0)
    spans.tracer.record(call(options=TextOptions(), first_token_at=104.5, ends=[ChoiceEnd(0, 109.0, "stop", stages)]))
    span = spans.server
    assert (span.start_time, span.end_time) == (1000 * SECOND, 1010 * SECOND)
    assert [(event.name, event.timestamp) for event in span.events] == [("first token", round(1004.5 * SECOND))]
    times = {s.name: ((s.start_time or 0) / SECOND, (s.end_time or 0) / SECOND) for s in spans.stages}
    assert times == {
        "queued": (1002.5, 1003.0), "prefill": (1003.0, 1005.0), "transfer": (1005.0, 1005.25),
        "decode": (1005.0, 1009.0),
    }  # fmt: skip
    assert {s.parent.span_id for s in spans.stages if s.parent} == {span.context.span_id}


def test_stages_of_each_choice_are_told_apart_and_never_begin_before_the_call(spans: Spans) -> None:
    long = StageTimes(queued=50.0, prefill=2.0, transfer=0.0, decode=4.0)
    spans.tracer.record(
        call(ends=[ChoiceEnd(1, 109.0, "stop", long), ChoiceEnd(0, 108.0, "length", None)], options=TextOptions(n=2))
    )
    assert {s.attributes["tandem.choice"] for s in spans.stages if s.attributes} == {1}
    assert {s.name: (s.start_time or 0) // SECOND for s in spans.stages} == {
        "queued": 1000, "prefill": 1003, "decode": 1005,
    }  # fmt: skip
    assert spans.server.attributes is not None
    assert spans.server.attributes["gen_ai.response.finish_reasons"] == ("length", "stop")


def test_of_many_choices_the_first_ones_have_stages(spans: Spans) -> None:
    stages = StageTimes(queued=1.0, prefill=1.0, transfer=1.0, decode=1.0)
    ends = [ChoiceEnd(index, 109.0, "stop", stages) for index in reversed(range(128))]
    spans.tracer.record(call(options=TextOptions(n=128), ends=ends))
    assert sorted(s.attributes["tandem.choice"] for s in spans.stages if s.attributes) == [  # type: ignore[type-var]
        index for index in range(4) for _ in range(4)
    ]
    assert spans.server.attributes is not None
    assert len(spans.server.attributes["gen_ai.response.finish_reasons"]) == 128  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**40])
async def test_seed_is_told_as_it_was_used_and_can_be_sent(spans: Spans, seed: int) -> None:
    api = Api(calls=spans.calls)
    assert (await api.complete(max_tokens=1, seed=seed)).status_code == 200
    assert spans.server.attributes is not None
    assert spans.server.attributes["gen_ai.request.seed"] == api.generator.requests[0].params.seed
    (of_resource,) = encode_spans([spans.server]).resource_spans
    (sent,) = [
        attribute.value.int_value
        for attribute in of_resource.scope_spans[0].spans[0].attributes
        if attribute.key == "gen_ai.request.seed"
    ]
    assert sent == api.generator.requests[0].params.seed


@pytest.mark.parametrize(
    ("fields", "error", "is_servers"),
    [
        ({"status": 200}, None, False),
        ({"status": 429}, "429", False),
        ({"status": 500}, "500", True),
        ({"status": None, "error": KeyError()}, "KeyError", True),
        ({"status": 200, "error": WorkerLost("gone")}, "WorkerLost", True),  # in the middle of a stream
        ({"status": 400, "error": InvalidRequest("no")}, "InvalidRequest", False),
        ({"status": 499, "client_gone": True}, "499", False),
        ({"status": "INTERNAL"}, "INTERNAL", True),
        ({"status": "INVALID_ARGUMENT"}, "INVALID_ARGUMENT", False),
        ({"status": "DEADLINE_EXCEEDED", "client_gone": True}, "DEADLINE_EXCEEDED", False),
    ],
)
def test_status_says_whose_fault_it_was(
    spans: Spans, fields: dict[str, Any], error: str | None, is_servers: bool
) -> None:
    spans.tracer.record(call(**fields))
    span = spans.server
    assert span.attributes is not None
    assert span.attributes.get("error.type") == error
    assert span.status.status_code is (StatusCode.ERROR if is_servers else StatusCode.UNSET)


def test_trace_that_its_client_does_not_sample_is_not_sent(spans: Spans) -> None:
    end = ChoiceEnd(0, 109.0, "stop", StageTimes(1.0, 1.0, 1.0, 1.0))
    spans.tracer.record(call(context=CallContext("r-1", TRACEPARENT[:-1] + "0"), ends=[end], options=TextOptions()))
    assert spans.servers == spans.stages == []

"""Traces by OpenTelemetry: each call that generates becomes a span, with spans for the stages of its first choices.

    POST /v1/chat/completions ├─────────────────────────────────────────┤   an event at the first token
      queued                     ├───┤
      prefill                        ├───────┤
      transfer                               ├──┤       while it lasts, the first token is with the client already
      decode                                 ├─────────────────────────┤

Spans are made of a call's record when it has ended, so that a call costs nothing more while it runs. Where stages lie
is reckoned back from the arrival of a choice's last chunk: its decode worker measured how long each took, by its own
clock.
Attributes are those of OpenTelemetry's semantic conventions for generative AI, HTTP and RPC, and `tandem.…`.

OpenTelemetry is imported only where an endpoint is set. Prompts and answers are never told.
"""

import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from cluster.call_record import CallRecord, ChoiceEnd
from cluster.config import ClusterConfig, ConfigError
from cluster.sequence_planner import wrapped_seed

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Attribute = str | int | float | bool | list[str]

# Calls that generate, and what the conventions call it; of a conversation over gRPC that is chat.
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/tandem.v1.Generation/Generate": "text_completion",
}
# Of a call's choices the first ones have spans for their stages. Each costs some hundredths of a millisecond, and
# 128 choices with four would fill a quarter of the queue that the SDK sends from.
_MAX_STAGED_CHOICES = 4
# gRPC codes that are the server's fault.
_SERVER_FAULTS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
_SECOND = 10**9  # in nanoseconds


def open_tracer(config: ClusterConfig) -> "CallTracer | None":
    """Sends traces to the configured endpoint; None: there is none.

    Raises:
        ConfigError: the packages are missing.
    """
    endpoint = config.otlp_endpoint
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise ConfigError(
            f"otlp_endpoint: traces need the extra otel: pip install '.[otel]' in a checkout ({exc.name} is missing)"
        ) from exc
    ours = Resource({"service.name": "tandem", "service.version": metadata.version("tandem-serve")})
    # What OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME say comes after ours, and wins.
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return CallTracer(provider, config.model_name, give_up=exporter.shutdown)


class CallTracer:
    """Turns records of calls into spans.

    Args:
        provider: of OpenTelemetry's SDK; shut down by `close`.
        model_name: what is served.
        give_up: makes the provider leave off sending, if it takes too long at the end.
    """

    def __init__(
        self, provider: "TracerProvider", model_name: str, *, give_up: Callable[[], None] = lambda: None
    ) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("tandem", metadata.version("tandem-serve"))
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        self._give_up = give_up

    def close(self, patience_s: float = 3.0) -> None:
        """Sends what has not been sent; blocks for `patience_s` at most, as when nobody is at the endpoint."""
        late = threading.Timer(patience_s, self._give_up)
        late.start()
        try:
            self._provider.shutdown()
        finally:
            late.cancel()

    def record(self, call: CallRecord) -> None:
        """Traces a call that has ended (a `call_record.Sink`); one that does not generate is passed over."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        operation = _OPERATIONS.get(call.path)
        if operation is None or call.ended_at is None:
            return
        given = {"traceparent": call.context.traceparent, "tracestate": call.context.tracestate}
        parent = self._propagator.extract({name: value for name, value in given.items() if value is not None})
        span = self._tracer.start_span(
            f"{call.method} {call.path}" if call.transport == "http" else call.path.removeprefix("/"),
            context=parent,
            kind=SpanKind.SERVER,
            attributes=self._attributes(call, operation),
            start_time=_nanoseconds(call.wall(call.started_at)),
        )
        if span.is_recording():
            if call.first_token_at is not None:
                span.add_event(
                    "first token",
                    {"tandem.time_to_first_token": call.first_token_at - call.started_at},
                    timestamp=_nanoseconds(call.wall(call.first_token_at)),
                )
            if (error := _error_of(call)) is not None:
                span.set_attribute("error.type", error)
                if _is_servers_fault(call):
                    span.set_status(Status(StatusCode.ERROR, error))
            within = set_span_in_context(span)
            for end in call.ends:
                if end.index >= _MAX_STAGED_CHOICES:
                    continue
                for name, start, stop in _stages(call, end):
                    stage = self._tracer.start_span(
                        name,
                        context=within,
                        attributes={"tandem.choice": end.index},
                        start_time=_nanoseconds(call.wall(start)),
                    )
                    stage.end(_nanoseconds(call.wall(stop)))
        span.end(_nanoseconds(call.wall(call.ended_at)))

    def _attributes(self, call: CallRecord, operation: str) -> dict[str, Attribute]:
        attributes: dict[str, Attribute | None] = {
            "gen_ai.operation.name": "chat" if call.is_conversation else operation,
            "gen_ai.provider.name": "tandem",
            "gen_ai.request.model": self._model_name,
            "tandem.request_id": call.context.request_id,
            "tandem.client_gone": call.client_gone,
            "tandem.prefill_worker": call.prefill_worker,
            "tandem.decode_worker": call.decode_worker,
        }
        if call.transport == "http":
            attributes |= {
                "http.request.method": call.method,
                "http.route": call.path,
                "url.path": call.path,
                "http.response.status_code": call.status,
            }
        else:
            service, _, method = call.path.removeprefix("/").partition("/")
            attributes |= {
                "rpc.system": "grpc",
                "rpc.service": service,
                "rpc.method": method,
                "rpc.response.status_code": call.status,
            }
        if (options := call.options) is not None:
            attributes |= {
                "gen_ai.request.max_tokens": options.max_tokens,
                "gen_ai.request.temperature": options.temperature,
                "gen_ai.request.top_p": options.top_p,
                "gen_ai.request.top_k": options.top_k or None,
                "gen_ai.request.presence_penalty": options.presence_penalty,
                "gen_ai.request.frequency_penalty": options.frequency_penalty,
                # As it was used: a client may give one of any length, but an attribute has 64 bits.
                "gen_ai.request.seed": None if options.seed is None else wrapped_seed(options.seed),
                "gen_ai.request.choice.count": options.n if options.n > 1 else None,
                "gen_ai.response.id": call.answer_id,
                "tandem.generation_id": call.generation_id,
                "gen_ai.response.model": self._model_name,
                "gen_ai.response.finish_reasons": [
                    end.finish_reason for end in sorted(call.ends, key=lambda end: end.index)
                ],
                "gen_ai.usage.input_tokens": call.num_prompt_tokens,
                "gen_ai.usage.output_tokens": call.num_completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": call.num_cached_tokens,
                "tandem.cached_tokens": call.num_cached_tokens,
            }
        return {name: value for name, value in attributes.items() if value is not None}


def _stages(call: CallRecord, end: ChoiceEnd) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of each stage that took any time, never before the call itself."""
    stages = end.stages
    if stages is None:
        return
    first_token = end.at - stages.decode
    prefill = first_token - stages.prefill
    for name, start, stop in (
        ("queued", prefill - stages.queued, prefill),
        ("prefill", prefill, first_token),
        ("transfer", first_token, first_token + stages.transfer),
        ("decode", first_token, end.at),
    ):
        if stop > start:
            yield name, max(start, call.started_at), max(stop, call.started_at)


def _error_of(call: CallRecord) -> str | None:
    """What went wrong, in a word; None: nothing."""
    if call.error is not None:
        return type(call.error).__name__
    failed = call.status >= 400 if isinstance(call.status, int) else call.status != "OK"
    return str(call.status) if failed else None


def _is_servers_fault(call: CallRecord) -> bool:
    """What a client did wrong is no error of the server's, by the conventions."""
    if call.client_gone:
        return False
    if isinstance(call.status, str):
        return call.status in _SERVER_FAULTS
    # A stream that fails in its middle has said 200 already.
    return call.status is None or call.status >= 500 or call.status < 400


def _nanoseconds(seconds: float) -> int:
    return round(seconds * _SECOND)

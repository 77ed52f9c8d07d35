"""Request ids and traces out of headers and metadata."""

import pytest

from cluster.call_context import call_context, first_values

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_headers_and_metadata_say_the_same() -> None:
    headers = [(b"X-Request-Id", b"r-1"), (b"traceparent", PARENT.encode()), (b"tracestate", b"a=1")]
    metadata = [("x-request-id", "r-1"), ("traceparent", PARENT), ("tracestate", "a=1"), ("some-bin", b"\xff")]
    assert call_context(headers) == call_context(metadata)
    context = call_context(headers)
    assert (context.request_id, context.traceparent, context.tracestate) == ("r-1", PARENT, "a=1")


def test_first_of_several_values_counts() -> None:
    assert first_values([(b"A", b"1"), (b"a", b"2")], ("a",)) == {"a": "1"}


@pytest.mark.parametrize("given", ["", "x" * 129, "two words", "line\nbreak", "é"])
def test_unsound_request_id_is_replaced(given: str) -> None:
    first, second = (call_context([("x-request-id", given)]).request_id for _ in range(2))
    assert given not in (first, second)
    assert first != second
    assert len(first) == 32


@pytest.mark.parametrize(
    "given",
    [
        "",
        PARENT.upper(),
        PARENT.replace("b7ad6b7169203331", "0" * 16),
        PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        "ff" + PARENT[2:],
        PARENT[:-1],
    ],
)
def test_unsound_trace_is_none(given: str) -> None:
    context = call_context([("traceparent", given), ("tracestate", "a=1")])
    assert (context.traceparent, context.tracestate) == (None, None)


def test_trace_of_a_later_version_is_taken_and_a_long_state_is_not() -> None:
    context = call_context([("traceparent", "01" + PARENT[2:] + "-more"), ("tracestate", "a" * 513)])
    assert context.traceparent is not None
    assert context.tracestate is None

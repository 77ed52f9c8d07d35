"""The error tree: what clients see of each, and how foreign statuses enter it."""

import grpc
import pytest

from cluster import errors
from cluster.errors import GenerationError, InvalidRequest, Leg, QueueFull, WorkerFailed, WorkerLost, error_from_status


@pytest.mark.parametrize(
    ("kind", "http_status", "grpc_code", "openai_type", "openai_code"),
    [
        ("InvalidRequest", 400, "INVALID_ARGUMENT", "invalid_request_error", None),
        ("ModelNotFound", 404, "NOT_FOUND", "invalid_request_error", "model_not_found"),
        ("QueueFull", 429, "RESOURCE_EXHAUSTED", "rate_limit_error", "queue_full"),
        ("Cancelled", 499, "CANCELLED", "invalid_request_error", "cancelled"),
        ("WorkerFailed", 500, "INTERNAL", "server_error", "worker_failed"),
        ("WorkerLost", 503, "UNAVAILABLE", "server_error", "worker_lost"),
        ("NoWorker", 503, "UNAVAILABLE", "server_error", "no_worker"),
        ("DeadlineExceeded", 504, "DEADLINE_EXCEEDED", "server_error", "deadline_exceeded"),
    ],
)
def test_every_error_says_how_it_is_shown(
    kind: str, http_status: int, grpc_code: str, openai_type: str, openai_code: str | None
) -> None:
    error = getattr(errors, kind)("why", param="field")
    assert isinstance(error, GenerationError)
    assert (error.http_status, error.grpc_code.name) == (http_status, grpc_code)
    assert (error.openai_type, error.openai_code) == (openai_type, openai_code)
    assert (error.message, str(error), error.param) == ("why", "why", "field")


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = {line.split("── ")[1].split()[0] for line in errors.__doc__.splitlines() if "── " in line}
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, GenerationError) and value is not GenerationError
    }
    assert drawn == defined


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_status_has_an_error_by_code_and_by_number(code: grpc.StatusCode) -> None:
    by_code = error_from_status(code, "why", leg=Leg.DECODE, worker_id="d0")
    by_number = error_from_status(code.value[0], "why", leg=Leg.DECODE, worker_id="d0")
    assert type(by_code) is type(by_number)
    assert by_code.message == by_number.message
    assert "why" in by_code.message


def test_a_workers_own_failure_names_the_leg_and_a_refusal_of_the_request_does_not() -> None:
    failed = error_from_status(grpc.StatusCode.INTERNAL, "out of luck", leg=Leg.PREFILL, worker_id="p1")
    assert isinstance(failed, WorkerFailed)
    assert failed.message == "prefill worker p1: out of luck"
    assert (failed.leg, failed.worker_id) == (Leg.PREFILL, "p1")
    assert error_from_status(3, "too long", leg=Leg.DECODE, worker_id="d1").message == "too long"
    assert error_from_status(999, "strange").message == "worker: strange"


def test_what_only_says_not_here_is_a_worker_lost_so_that_another_is_tried() -> None:
    for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED):
        assert type(error_from_status(code, "draining")) is WorkerLost


def test_further_particulars_are_kept() -> None:
    assert InvalidRequest("long", code="context_length_exceeded").openai_code == "context_length_exceeded"
    assert QueueFull("full", retry_after_s=3.0).retry_after_s == 3.0

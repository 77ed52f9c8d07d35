"""Ids of calls, and trailers."""

import pytest

from cluster.call_context import CallContext
from cluster.errors import InvalidRequest, NoWorker, QueueFull
from cluster.generation.metadata import Trailers, request_id_of, status_message
from cluster.generator import StageTimes
from cluster.text_generator import TextDelta
from engine.sampling_params import FinishReason

CALL = CallContext(request_id="call-7")


def delta(index: int = 0, *, worker: str = "d0", cached: int = 32, end: bool = False, queued: float = -1) -> TextDelta:
    return TextDelta(
        index=index,
        text="x",
        tokens=(),
        finish_reason=FinishReason.LENGTH if end else None,
        num_cached_tokens=cached,
        prefill_worker="p0",
        decode_worker=worker,
        stages=StageTimes(queued, 0.25, 0.0005, 12.3456789) if queued >= 0 else None,
    )


def test_request_has_its_own_id_or_its_calls() -> None:
    assert request_id_of("mine", CALL, in_flight=()) == "mine"
    assert request_id_of("", CALL, in_flight=("other",)) == "call-7"


def test_call_that_is_tried_again_gets_a_request_id_of_its_own() -> None:
    made = request_id_of("", CALL, in_flight=("call-7",))
    assert made not in ("", "call-7")
    assert request_id_of("", CALL, in_flight=("call-7", made)) != made


@pytest.mark.parametrize("wanted", ["a b", "ä", "x" * 129, "line\nbreak", "🍜"])
def test_request_id_that_no_header_could_carry_is_refused(wanted: str) -> None:
    with pytest.raises(InvalidRequest, match="visible ASCII") as caught:
        request_id_of(wanted, CALL, in_flight=())
    assert caught.value.param == "request_id"


def test_trailers_grow_with_what_is_known() -> None:
    trailers = Trailers("call-7")
    assert trailers.metadata() == (("x-request-id", "call-7"),)
    trailers.add(delta())
    assert dict(trailers.metadata()) == {
        "x-request-id": "call-7",
        "x-tandem-prefill-worker": "p0",
        "x-tandem-decode-worker": "d0",
        "x-tandem-cached-tokens": "32",
    }
    trailers.add(delta(end=True, queued=0.5))
    assert dict(trailers.metadata()) | {"x-tandem-cached-tokens": "?"} == {
        "x-request-id": "call-7",
        "x-tandem-prefill-worker": "p0",
        "x-tandem-decode-worker": "d0",
        "x-tandem-cached-tokens": "?",
        "x-tandem-queued-ms": "500.000",
        "x-tandem-prefill-ms": "250.000",
        "x-tandem-transfer-ms": "0.500",
        "x-tandem-decode-ms": "12345.679",
    }


def test_choice_that_ends_last_is_told_of() -> None:
    trailers = Trailers("call-7")
    trailers.add(delta(0, worker="d0"))
    trailers.add(delta(1, worker="d1", end=True, queued=1))
    trailers.add(delta(0, worker="d0"))
    assert dict(trailers.metadata())["x-tandem-decode-worker"] == "d1"
    trailers.add(delta(0, worker="d0", cached=0, end=True, queued=2))
    told = dict(trailers.metadata())
    assert (told["x-tandem-decode-worker"], told["x-tandem-queued-ms"]) == ("d0", "2000.000")
    assert told["x-tandem-cached-tokens"] == "32"  # as it was when the prompt was read


def test_call_without_any_token_names_no_workers() -> None:
    trailers = Trailers("call-7")
    trailers.add(TextDelta(index=0, text="", tokens=(), finish_reason=FinishReason.LENGTH))
    assert trailers.metadata() == (("x-request-id", "call-7"),)


def test_error_says_when_to_come_again_if_it_knows() -> None:
    trailers = Trailers("call-7")
    assert dict(trailers.metadata(NoWorker("none"))) == {"x-request-id": "call-7"}
    told = dict(trailers.metadata(QueueFull("full", retry_after_s=2.5)))
    assert (told["retry-after-ms"], told["grpc-retry-pushback-ms"]) == ("2500", "2500")
    assert dict(trailers.metadata(QueueFull("full", retry_after_s=0)))["retry-after-ms"] == "1"


def test_message_of_a_status_is_cut_to_what_a_header_carries() -> None:
    assert status_message(NoWorker("none is there")) == "none is there"
    assert len(status_message(NoWorker("🍜" * 1_000_000)).encode()) * 3 < 8192

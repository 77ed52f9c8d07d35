"""What is written of a call while it is served, and the line that is made of it."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from cluster.access_log import write_access_line
from cluster.call_context import CallContext
from cluster.call_record import CallRecord, CallRecorder, current_call, name_answer, recording, rename_call
from cluster.generator import StageTimes
from cluster.openai.request_id import RequestId
from cluster.text_generator import TextDelta
from cluster.text_request import PlannedText, TextOptions
from engine.executor import SampledToken
from engine.sampling_params import FinishReason
from worker import log

CONTEXT = CallContext("r-1")
STAGES = StageTimes(queued=1.0, prefill=2.0, transfer=0.5, decode=4.0)


def ticking() -> Callable[[], float]:
    """Every look at it is a second later."""
    seconds = iter(range(100, 10_000))
    return lambda: float(next(seconds))


def recorder() -> tuple[CallRecorder, list[CallRecord]]:
    ended: list[CallRecord] = []
    return CallRecorder([ended.append], clock=ticking(), wall_clock=lambda: 5_000.0), ended


def planned(num_prompt_tokens: int, n: int = 1) -> PlannedText:
    return PlannedText("cmpl-1", TextOptions(n=n), None, tuple(range(num_prompt_tokens)), (), 0.0)


def delta(index: int = 0, num_tokens: int = 1, **fields: Any) -> TextDelta:
    tokens = tuple(SampledToken(token_id, None, ()) for token_id in range(num_tokens))
    return TextDelta(index=index, text="x", tokens=tokens, **fields)


def test_record_is_the_current_one_within_its_call_alone() -> None:
    calls, ended = recorder()
    with calls.call(CONTEXT, "http", "GET", "/x") as record:
        assert current_call.get() is record
        assert log.request_id.get() == "r-1"
        assert record.duration_s == 1.0
    assert (current_call.get(), log.request_id.get()) == (None, None)
    assert ended == [record]
    assert (record.started_at, record.ended_at, record.wall(record.started_at)) == (100.0, 102.0, 5_000.0)


def test_call_that_is_named_by_its_message_is_known_by_that() -> None:
    calls, _ = recorder()
    with calls.call(CONTEXT, "grpc", "POST", "/s/M") as record:
        rename_call(CallContext("mine"))
        assert log.request_id.get() == "mine"
    assert record.context.request_id == "mine"
    rename_call(CallContext("nobody's"))
    assert log.request_id.get() is None


def test_tokens_are_counted_a_prompt_once_and_cached_ones_by_its_first_choice() -> None:
    calls, _ = recorder()
    with calls.call(CONTEXT, "http", "POST", "/v1/completions") as record:
        assert record.first_token_at is None
        with recording([planned(10, n=2), planned(5)]) as told:
            told(delta(0, 0))
            assert record.first_token_at is None
            told(delta(0, 3, num_cached_tokens=8))
            told(delta(1, 2, num_cached_tokens=8))
            told(delta(2, 1, num_cached_tokens=4))
            first_token_at = record.first_token_at
            for index in (1, 0, 2):
                told(
                    delta(
                        index,
                        finish_reason=FinishReason.STOP,
                        num_cached_tokens=8 if index < 2 else 4,
                        stages=STAGES,
                        prefill_worker="p0",
                        decode_worker="d0",
                    )
                )
    assert (record.num_prompt_tokens, record.num_completion_tokens, record.num_cached_tokens) == (15, 9, 12)
    assert record.first_token_at == first_token_at == 101.0
    assert [(end.index, end.finish_reason, end.stages) for end in record.ends] == [
        (1, "stop", STAGES), (0, "stop", STAGES), (2, "stop", STAGES),
    ]  # fmt: skip
    assert (record.generation_id, record.prefill_worker, record.decode_worker) == ("cmpl-1", "p0", "d0")


def test_outside_of_a_call_nothing_is_written() -> None:
    with recording([planned(10)]) as told:
        told(delta())


async def test_calls_side_by_side_have_records_of_their_own() -> None:
    calls, ended = recorder()
    turn = asyncio.Event()

    async def serve(name: str, num_tokens: int) -> None:
        with calls.call(CallContext(name), "http", "POST", "/v1/completions"), recording([planned(1)]) as told:
            await turn.wait()
            told(delta(num_tokens=num_tokens))
            assert log.request_id.get() == name

    tasks = [asyncio.create_task(serve("a", 1)), asyncio.create_task(serve("b", 2))]
    await asyncio.sleep(0)
    turn.set()
    await asyncio.gather(*tasks)
    assert {r.context.request_id: r.num_completion_tokens for r in ended} == {"a": 1, "b": 2}


# --- over HTTP


async def served(app: Any, path: str = "/x") -> tuple[CallRecord, list[dict[str, Any]]]:
    """The record of a request, and what was sent for it."""
    calls, ended = recorder()
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"api_key=secret"}
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read here")

    with suppress(KeyError):
        await RequestId(app, calls)(scope | {"headers": [(b"x-request-id", b"r-7")]}, receive, send)
    return ended[0], sent


async def test_reply_has_the_calls_id_and_the_record_its_status() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["state"]["request_id"] == log.request_id.get() == "r-7"
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    record, sent = await served(app, "/a\nb")
    assert (b"x-request-id", b"r-7") in sent[0]["headers"]
    assert (record.method, record.path, record.status, record.client_gone) == ("GET", "/a%0Ab", 418, False)


async def test_reply_that_is_cut_off_tells_of_a_client_that_left() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    record, _ = await served(app)
    assert (record.status, record.client_gone, record.error) == (200, True, None)


async def test_crash_is_recorded() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("x")

    record, _ = await served(app)
    assert isinstance(record.error, KeyError)


# --- the line


def test_line_says_all_in_words_and_fields(caplog: pytest.LogCaptureFixture) -> None:
    calls = CallRecorder([write_access_line], clock=ticking(), wall_clock=lambda: 0.0)
    with caplog.at_level(logging.INFO), calls.call(CONTEXT, "http", "POST", "/v1/completions") as record:
        with recording([planned(10)]) as told:
            told(delta(num_tokens=3, num_cached_tokens=8, decode_worker="d0", finish_reason=FinishReason.LENGTH))
        name_answer("cmpl-2")
        record.status, record.client_gone, record.error = 200, True, KeyError("secret")
    (line,) = caplog.records
    assert line.getMessage() == (
        "POST /v1/completions 200 in 3.000 s, 10 tokens in (8 cached), 3 out, KeyError, the client left"
    )
    assert line.request_id == "r-1"  # type: ignore[attr-defined]
    assert line.fields == {  # type: ignore[attr-defined]
        "method": "POST", "path": "/v1/completions", "status": 200, "duration_s": 3.0, "client_gone": True,
        "generation_id": "cmpl-1", "answer_id": "cmpl-2", "prompt_tokens": 10, "completion_tokens": 3,
        "cached_tokens": 8, "prefill_worker": None, "decode_worker": "d0", "error": "KeyError",
    }  # fmt: skip


def test_no_line_is_made_that_nobody_reads(caplog: pytest.LogCaptureFixture) -> None:
    calls = CallRecorder([write_access_line])
    with caplog.at_level(logging.WARNING), calls.call(CONTEXT, "http", "GET", "/x"):
        pass
    assert not caplog.records

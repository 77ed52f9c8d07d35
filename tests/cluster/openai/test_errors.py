"""Whatever goes wrong, the answer is an error object with the right status, and costs nothing."""

import json
from typing import Any, NoReturn

import pytest

from cluster.errors import (
    DeadlineExceeded,
    GenerationError,
    InvalidRequest,
    Leg,
    NoWorker,
    QueueFull,
    WorkerFailed,
    WorkerLost,
)
from cluster.openai.body import parse_object
from fake_generator import FakeGenerator
from gateway_api import MODEL, Api, error_of

COMPLETIONS = "/v1/completions"


def completion(fields: str) -> bytes:
    return b'{"model": "fake", "prompt": "hi", "max_tokens": 2, ' + fields.encode() + b"}"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": "fake", "prompt": "hi',
        b"",
        b"[]",
        b"1",
        b"null",
        b'"x"',
        b"true",
        b'{"model": "fake", "prompt": "\xff\xfe"}',
        completion('"temperature": NaN'),
        completion('"temperature": Infinity'),
        completion('"temperature": -Infinity'),
        completion('"temperature": 1e999'),
        b'{"model": "fake", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "fake", "prompt": "\\ud83c"}',
        b'{"model": "fake", "prompt": "hi", "seed": ' + b"9" * 5000 + b"}",
        b'\xef\xbb\xbf\xef\xbb\xbf{"model": "fake", "prompt": "hi"}',
    ],
    ids=[
        "cut off", "empty", "array", "number", "null", "string", "truth", "not UTF-8", "NaN", "Infinity", "-Infinity",
        "out of range", "deep", "lone surrogate", "endless number", "two byte order marks",
    ],
)  # fmt: skip
async def test_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    api = Api()
    error = error_of(await api.post(COMPLETIONS, raw=raw), 400)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_json")
    assert api.generator.requests == []


def test_byte_order_mark_before_the_object_is_passed_over() -> None:
    assert parse_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


async def test_internal_error_says_that_the_connection_ends() -> None:
    def fail() -> NoReturn:
        raise RuntimeError("a secret")

    api = Api()
    api.generator.workers = fail  # type: ignore[method-assign]
    reply = await api.http.get("/health")
    assert error_of(reply, 500) == {
        "message": "internal error", "type": "server_error", "param": None, "code": "internal_error"
    }  # fmt: skip
    assert reply.headers["connection"] == "close"


def test_surrogate_pair_in_escapes_is_a_character() -> None:
    assert parse_object(b'{"a": "\\ud83c\\udf5c"}') == {"a": "🍜"}


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "streamed"])
async def test_body_over_the_limit_is_refused_without_being_read(declared: bool) -> None:
    api = Api(max_body_bytes=1000)

    async def pieces() -> Any:
        for _ in range(100):
            yield b"x" * 100

    content: Any = b"x" * 10_000 if declared else pieces()
    assert error_of(await api.http.post(COMPLETIONS, content=content), 413)["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("prompt", [5, {"a": 1}, None, [], [[]], [1.5], ["a", 5], [None], [[5], [-5]], [[5], "a"], True]),
        ("prompt", [[10**9], [-1], [2**31], [2**63], [2**70], [5, 6, -7], [49152], [True]]),
        ("max_tokens", [-1, -(2**31), 1.5, "x", True, 2**31, 2**63, 10**30, "16", 16.0]),
        ("temperature", [-0.1, "hot", True, [1]]),
        ("top_p", [-0.1, 1.01, "x"]),
        ("n", [0, -1, 129, 100_000, 1.5, True]),
        ("presence_penalty", [-2.1, 2.1, "x"]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0, -1, "x"]),
        ("min_p", [-0.1, 1.1]),
        ("top_k", [-2, 1.5, 2**31]),
        ("min_tokens", [-1, 99, 1.5]),
        ("seed", [1.5, "x", True]),
        ("stream", ["yes", 1]),
        ("echo", [1, "true"]),
        ("stop", [[1, 2], 5, {"a": 1}, [None], ["x"] * 17, ["x" * 1025], ["☃"] * 100_000, ["x" * 1_000_000]]),
        ("logit_bias", [{"999999999": 5}, {"-1": 5}, {"x": 5}, {"5": "x"}, {"5": True}, {"5": 101}, [5], {"٣": 1}]),
        ("logit_bias", [{"1" * 5000: 1}]),
        ("stop_token_ids", [[-1], [49152], ["x"], 5, [1] * 300]),
        ("stream_options", [{"include_usage": True}]),  # without stream
        ("cache_salt", [5]),
        ("priority", [2**31, "x"]),
        ("user", [5]),
        ("suffix", ["text"]),
        ("best_of", [0, 2]),
        ("use_beam_search", [True]),
        ("model", [None, 5]),
    ],
)
async def test_value_that_is_not_allowed_is_refused_by_its_field(field: str, values: list[Any]) -> None:
    api = Api()
    for value in values:
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, field: value}
        error = error_of(await api.post(COMPLETIONS, body), 400)
        assert error["type"] == "invalid_request_error"
        assert error["param"] is not None
        assert error["param"].partition("[")[0].partition(".")[0] == field, (value, error)
        assert len(error["message"]) < 400
    assert api.generator.requests == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages must have at least 1 item, not []"),
        ({"messages": "hi"}, "messages must be a valid list, not 'hi'"),
        ({"stream": True, "stream_options": 5}, "stream_options must be an object, not 5"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object, not [1]"),
        ({"temperature": -1}, "temperature must be greater than or equal to 0, not -1"),
    ],
)
async def test_wrong_value_is_told_in_a_sentence_about_its_field(fields: dict[str, Any], message: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
    assert error_of(await Api().post("/v1/chat/completions", body), 400)["message"] == message


@pytest.mark.parametrize(("body", "param"), [({}, "model"), ({"model": MODEL}, "prompt"), ({"prompt": "x"}, "model")])
async def test_missing_field_is_named(body: dict[str, Any], param: str) -> None:
    assert error_of(await Api().post(COMPLETIONS, body), 400)["param"] == param


@pytest.mark.parametrize("prompt", ["", ["", "x"]])
async def test_prompt_without_tokens_is_refused(prompt: Any) -> None:
    assert error_of(await Api().complete(prompt), 400)["param"] == "prompt"


async def test_unknown_model_is_not_found() -> None:
    api = Api()
    for reply in (
        await api.post(COMPLETIONS, {"model": "other", "prompt": "hi"}),
        await api.post("/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": "x"}]}),
        await api.http.get("/v1/models/other"),
    ):
        error = error_of(reply, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert MODEL in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("POST", "/v1", 404), ("GET", COMPLETIONS, 405), ("DELETE", "/v1/models", 405)],
)
async def test_unknown_path_and_method_have_error_objects(method: str, path: str, status: int) -> None:
    error = error_of(await Api().http.request(method, path), status)
    assert path in error["message"]


FAILURES: list[tuple[Exception, int, str]] = [
    (QueueFull("full", retry_after_s=2.5), 429, "rate_limit_error"),
    (NoWorker("no decode worker is ready"), 503, "server_error"),
    (WorkerLost("decode worker d0: gone", leg=Leg.DECODE), 503, "server_error"),
    (WorkerFailed("prefill worker p0: broken", leg=Leg.PREFILL), 500, "server_error"),
    (DeadlineExceeded("the deadline passed"), 504, "server_error"),
    (InvalidRequest("no", param="prompt"), 400, "invalid_request_error"),
    (RuntimeError("secret"), 500, "server_error"),
]


@pytest.mark.parametrize(("failure", "status", "kind"), FAILURES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_failure_before_the_first_token_has_its_status(
    failure: Exception, status: int, kind: str, stream: bool, n: int
) -> None:
    api = Api(FakeGenerator(fail=failure))
    reply = await api.complete("Hi", stream=stream, n=n)
    error = error_of(reply, status)
    assert error["type"] == kind
    if isinstance(failure, GenerationError):
        assert error["message"] == failure.message
    else:
        assert "secret" not in reply.text
    if isinstance(failure, QueueFull):
        assert reply.headers["retry-after"] == "3"
    assert len(api.generator.closed) == len(api.generator.requests)
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize(("failure", "status", "kind"), FAILURES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
async def test_failure_in_the_middle_of_a_stream_is_an_event(
    failure: Exception, status: int, kind: str, path: str
) -> None:
    api = Api(FakeGenerator(fail=failure, fail_after=2))
    # The seed's first tokens are whole characters: each is an event.
    body = {"model": MODEL, "stream": True, "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "seed": 1}
    reply = await api.post(path, body)
    assert reply.status_code == 200
    *begun, last, done, end = reply.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["type"] == kind
    assert set(error) == {"message", "type", "param", "code"}
    assert "secret" not in reply.text
    assert len(begun) >= 2


async def test_failure_after_some_tokens_has_its_status_when_nothing_was_streamed() -> None:
    api = Api(FakeGenerator(fail=WorkerFailed("decode worker d0: broken"), fail_after=2))
    assert "decode worker d0" in error_of(await api.complete("Hi"), 500)["message"]


async def test_neighbours_of_a_refused_request_go_on() -> None:
    api = Api()
    assert (await api.complete([-1])).status_code == 400
    assert (await api.complete("Hi", max_tokens=2)).status_code == 200


async def test_one_bad_prompt_refuses_the_whole_list() -> None:
    api = Api()
    error_of(await api.complete([[5, 6], [10**9]]), 400)
    assert api.generator.requests == []

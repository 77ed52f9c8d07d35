"""Lines of a log, for people and for programs."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from worker import log
from worker.log import JsonFormatter, TextFormatter, configure_logging


def record(message: str = "two %s", *args: object, **attributes: object) -> logging.LogRecord:
    made = logging.LogRecord("cluster.x", logging.WARNING, "x.py", 1, message, args or ("words",), None)
    made.created = datetime(2026, 1, 2, 3, 4, 5, 678_900, UTC).timestamp()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def serving() -> Iterator[None]:
    token = log.request_id.set("r-1")
    yield
    log.request_id.reset(token)


def test_json_line_has_time_level_logger_and_message() -> None:
    assert json.loads(JsonFormatter().format(record())) == {
        "time": "2026-01-02T03:04:05.678Z",
        "level": "warning",
        "logger": "cluster.x",
        "message": "two words",
    }


@pytest.mark.usefixtures("serving")
def test_request_id_is_the_records_or_the_contexts() -> None:
    for attributes, request_id in (({}, "r-1"), ({"request_id": "r-2"}, "r-2")):
        assert json.loads(JsonFormatter().format(record(**attributes)))["request_id"] == request_id
        assert TextFormatter().format(record(**attributes)) == f"WARNING cluster.x: two words [{request_id}]"


def test_text_line_outside_of_a_request_is_as_it_was() -> None:
    assert TextFormatter().format(record()) == "WARNING cluster.x: two words"


def test_fields_are_facts_by_name_in_json_alone() -> None:
    fields = {"status": 200, "path": "/a", "what": object}
    said: dict[str, Any] = json.loads(JsonFormatter().format(record(fields=fields)))
    assert (said["status"], said["path"], said["what"]) == (200, "/a", str(object))
    assert "200" not in TextFormatter().format(record(fields=fields))


def test_json_stays_one_line_whatever_is_said() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        failed = record("a\nb \u2028 \ud800 é %s", "x", exc_info=sys.exc_info(), stack_info="Stack:\n here")
    line = JsonFormatter().format(failed)
    assert line.isascii()
    assert len(line.splitlines()) == 1
    said = json.loads(line)
    assert said["message"].startswith("a\nb")
    assert said["exc"].startswith("Traceback")
    assert said["exc"].endswith("ValueError: first\nsecond")
    assert said["stack"] == "Stack:\n here"


def test_whole_process_logs_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    level, quiet = root.level, {name: logging.getLogger(name).level for name in ("httpx", "httpcore")}
    monkeypatch.setattr(root, "handlers", [])
    said = io.StringIO()
    try:
        configure_logging("info", "json", stream=said, worker_id="decode-0")
        logging.getLogger("some.library").info("started")
        logging.getLogger("httpx").info("a request of our own")
        logging.getLogger("any").debug("too fine")
    finally:
        root.setLevel(level)
        for name, before in quiet.items():
            logging.getLogger(name).setLevel(before)
    (line,) = said.getvalue().splitlines()
    assert (json.loads(line)["logger"], json.loads(line)["worker_id"]) == ("some.library", "decode-0")

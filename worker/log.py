"""What a process says: one line an event, as text or as JSON, with the id of the request that it is about.

The id is looked for in the record (`extra={"request_id": …}`), then in the context of whoever logs (`request_id`): so a
library's line that is written while a request is served has it too. `extra={"fields": {…}}` are facts of the event by
name: a JSON line has each under its name, text leaves them out, as its message says them.
"""

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import IO, Any, Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

# Of the request that is being served in this context; None: of nobody's.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

# Each tells of every request it sends: the gateway's own fetching of metrics would fill the log.
_CHATTERERS = ("httpx", "httpcore")


def configure_logging(level: LogLevel, log_format: LogFormat, *, stream: IO[str] | None = None, **facts: str) -> None:
    """Makes the whole process log this way, its libraries as well; what has been configured before stays.

    Args:
        stream: None: stderr.
        facts: what every JSON line says besides, such as who logs.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(facts) if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for name in _CHATTERERS:
        logging.getLogger(name).setLevel(logging.WARNING)


class TextFormatter(logging.Formatter):
    """For people: level, logger, message, and the request's id at the end."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        about = _request_id_of(record)
        return line if about is None else f"{line} [{about}]"


class JsonFormatter(logging.Formatter):
    """For programs: an object a line. `time` is RFC 3339 in UTC; `exc` is a traceback.

    Args:
        facts: what every line says besides.
    """

    def __init__(self, facts: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._facts = dict(facts or {})

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._facts,
        }
        if (about := _request_id_of(record)) is not None:
            said["request_id"] = about
        said |= getattr(record, "fields", {})
        if record.exc_info:
            said["exc"] = self.formatException(record.exc_info)
        if record.stack_info:
            said["stack"] = self.formatStack(record.stack_info)
        # Escaped: a line stays a line, and UTF-8, whatever a message holds.
        return json.dumps(said, default=str)


def _request_id_of(record: logging.LogRecord) -> str | None:
    about: str | None = getattr(record, "request_id", None)
    return about if about is not None else request_id.get()

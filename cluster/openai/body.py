"""A request's body: bounded, UTF-8, one JSON object."""

import json
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from cluster.errors import Cancelled, InvalidRequest
from cluster.openai.error_replies import RequestTooLarge
from engine.strict_json import parse_json


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the body.

    Raises:
        RequestTooLarge: the body is longer than `max_bytes`; not more than that is read.
        InvalidRequest: it is no JSON object, or holds numbers or characters that JSON and Unicode do not have.
        Cancelled: the client left in the middle of it.
    """
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect as exc:
        raise Cancelled("the client left while it sent its request") from exc
    return parse_object(bytes(body))


def parse_object(body: bytes) -> dict[str, Any]:
    """See `read_object`."""
    try:
        content = parse_json(body.decode("utf-8-sig"))  # some editors put a byte order mark before it
        if b"\\u" in body:
            # An escape can write half a surrogate pair, which no encoding of Unicode can express.
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"the body is not UTF-8: {exc}", code="invalid_json") from exc
    except UnicodeEncodeError as exc:
        raise InvalidRequest("the body holds a lone surrogate, which is no character", code="invalid_json") from exc
    except RecursionError as exc:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from exc
    except ValueError as exc:
        raise InvalidRequest(f"the body is not valid JSON: {exc}", code="invalid_json") from exc
    if not isinstance(content, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_kind(content)}", code="invalid_json")
    return content


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body has more than {max_bytes} bytes", code="request_too_large")


def _kind(content: object) -> str:
    return {list: "an array", str: "a string", bool: "a truth value", type(None): "null"}.get(type(content), "a number")

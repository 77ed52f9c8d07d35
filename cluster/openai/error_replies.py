"""Every error as OpenAI's error object, with the status that belongs to it."""

from http import HTTPStatus
from math import ceil
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cluster.errors import GenerationError, InvalidRequest, QueueFull


class RequestTooLarge(InvalidRequest):
    """The body has more bytes than are read."""

    http_status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


def error_object(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_object_of(error: Exception) -> dict[str, Any]:
    """The body of an error of ours; any other is told as an internal one, without its words."""
    if isinstance(error, GenerationError):
        return error_object(error.message, error.openai_type, param=error.param, code=error.openai_code)
    return error_object("internal error", "server_error", code="internal_error")


def install_error_handlers(app: FastAPI) -> None:
    """Makes `app` answer every error with an error object."""
    app.add_exception_handler(GenerationError, _generation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)


async def _generation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GenerationError)
    headers = {}
    if isinstance(error, QueueFull):
        headers["retry-after"] = str(max(1, ceil(error.retry_after_s)))
    return JSONResponse(error_object_of(error), status_code=error.http_status, headers=headers)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    code = HTTPStatus(error.status_code).name.lower()
    body = error_object(message, "invalid_request_error", code=code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _internal_error(request: Request, error: Exception) -> JSONResponse:
    # The server writes the traceback to its log, and closes the connection: a client shall not use it again.
    return JSONResponse(
        error_object_of(error), status_code=HTTPStatus.INTERNAL_SERVER_ERROR, headers={"connection": "close"}
    )

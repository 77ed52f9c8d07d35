"""API keys on the HTTP API: every path but `/health` wants one, whether or not there is anything at it."""

from http import HTTPStatus

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api_keys import REFUSAL, ApiKeys
from cluster.call_context import AUTHORIZATION, first_values
from cluster.openai.error_replies import error_object

# Whoever watches a server's health need not know its keys.
_OPEN = "/health"


class Authentication:
    """ASGI middleware; a request without a key is answered before its body is read.

    Args:
        keys: None: everybody may come in.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys is None or scope["type"] != "http" or scope["path"] == _OPEN:
            await self._app(scope, receive, send)
            return
        given = first_values(scope["headers"], (AUTHORIZATION,))
        if self._keys.accept(given.get(AUTHORIZATION)):
            await self._app(scope, receive, send)
        else:
            await _refusal()(scope, receive, send)


def _refusal() -> JSONResponse:
    return JSONResponse(
        error_object(REFUSAL, "invalid_request_error", code="invalid_api_key"),
        status_code=HTTPStatus.UNAUTHORIZED,
        headers={"www-authenticate": "Bearer"},
    )

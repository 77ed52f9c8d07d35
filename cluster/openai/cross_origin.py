"""Which web sites' pages may read answers: CORS, by Starlette, with errors in the form of all others.

A key is never a cookie: a page that has none of its own gets in nowhere with it, so `*` beside keys gives nothing away.
Without keys it lets every page that is open in a browser near the server use the model.
"""

from collections.abc import Sequence
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from cluster.call_context import CACHED_TOKENS, DECODE_WORKER, PREFILL_WORKER, REQUEST_ID
from cluster.openai.error_replies import error_object
from cluster.openai.reply_headers import SERVER_TIMING

# What replies have beside what a browser shows to any page.
_EXPOSED = (REQUEST_ID, PREFILL_WORKER, DECODE_WORKER, CACHED_TOKENS, SERVER_TIMING, "retry-after")


def across_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application, open to pages of these origins; none: as it is."""
    if not origins:
        return app
    return _CrossOrigin(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        allow_credentials=False,  # keys go in a header, which a page must know
        expose_headers=_EXPOSED,
    )


class _CrossOrigin(CORSMiddleware):
    """ASGI middleware."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == HTTPStatus.OK:
            return response
        message = f"{bytes(response.body).decode()}: pages of {request_headers['origin']} may not ask for this"
        body = error_object(message, "invalid_request_error", code="cross_origin_refused")
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return JSONResponse(body, status_code=response.status_code, headers=headers)

"""The outermost layer of the HTTP API: every request is a recorded call, and every reply carries `x-request-id`.

The id is the client's own, if it gave a sound one, or one made here.
"""

from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.call_context import REQUEST_ID, call_context
from cluster.call_record import CallRecorder

_CLIENT_CLOSED_REQUEST = 499  # what stands for a reply that nobody was there for
_MAX_PATH = 256  # characters, of a path that is told


class RequestId:
    """ASGI middleware; the id is in the request's state as `request_id`.

    Args:
        calls: None: nobody keeps account.
    """

    def __init__(self, app: ASGIApp, calls: CallRecorder | None = None) -> None:
        self._app = app
        self._calls = calls or CallRecorder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = call_context(scope["headers"])
        scope.setdefault("state", {})["request_id"] = context.request_id
        is_complete = False
        # Quoted: a line break in a path shall not look like another line of a log.
        path = quote(scope["path"])[:_MAX_PATH]
        with self._calls.call(context, "http", scope["method"], path) as record:

            async def send_with_id(message: Message) -> None:
                nonlocal is_complete
                if message["type"] == "http.response.start":
                    record.status = message["status"]
                    MutableHeaders(scope=message)[REQUEST_ID] = context.request_id
                elif message["type"] == "http.response.body":
                    is_complete = not message.get("more_body", False)
                await send(message)

            try:
                await self._app(scope, receive, send_with_id)
            except Exception as exc:
                record.error = record.error or exc
                raise
            finally:
                record.client_gone = not is_complete or record.status == _CLIENT_CLOSED_REQUEST

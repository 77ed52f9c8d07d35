"""HTTP/1.1 as httptools parses it, with a bound on a request's head, which uvicorn's protocol over it lacks."""

import json
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.openai.error_replies import error_object

# Of request line and headers; about as much as other servers take, and as uvicorn's other protocol does.
MAX_HEAD_BYTES = 64 * 1024


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request is still in its headers after `MAX_HEAD_BYTES` (431).

    What comes in one piece is counted from the next one on: so a body that came together with its head counts for
    nothing, and what is kept is bounded by a piece more.
    """

    _is_in_head = False
    _num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        if not (was_in_head and self._is_in_head):
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def _refuse(self) -> None:
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        message = f"the request's line and headers have more than {MAX_HEAD_BYTES} bytes"
        body = json.dumps(error_object(message, "invalid_request_error", code="headers_too_large")).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

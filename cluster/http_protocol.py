"""HTTP/1.1 as httptools parses it, with two things that uvicorn's protocol over it lacks: a bound on a request's head,
and error objects for what is no request."""

import json
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.call_context import REQUEST_ID, call_context
from cluster.openai.error_replies import error_object

# Of request line and headers; about as much as other servers take, and as uvicorn's other protocol does.
MAX_HEAD_BYTES = 64 * 1024

_MALFORMED = "this is no HTTP/1.1 request: its line, headers or chunks are malformed, or contradict each other"
_TOO_LARGE = f"the request's line and headers have more than {MAX_HEAD_BYTES} bytes"


class _HeadTooLarge(Exception):
    """Ends the parsing; to the protocol it is one error of the parser among others."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request has more than `MAX_HEAD_BYTES` of headers (431), or cannot be read (400).

    Headers count as the parser tells them, trailers behind a chunked body too. It tells a header when it is whole: so
    what comes while none of a body does counts as well, and a header without an end is kept for a piece more at most.
    """

    _num_head_bytes = 0  # told, of this request
    _num_untold_bytes = 0  # received since the parser told of a body, or of a request's end
    _is_too_large = False

    def data_received(self, data: bytes) -> None:
        self._num_untold_bytes += len(data)
        super().data_received(data)
        if self._num_untold_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._is_too_large = True
            self.send_400_response(_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._num_untold_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_untold_bytes = 0
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._is_too_large = True
            raise _HeadTooLarge

    def send_400_response(self, msg: str) -> None:
        """The last words on this connection, instead of `msg`."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(self._refusal())
        # Else a reply is on its way, of which they would look like a part.
        self.transport.close()

    def _refusal(self) -> bytes:
        if self._is_too_large:
            status, message, code = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LARGE, "headers_too_large"
        else:
            status, message, code = HTTPStatus.BAD_REQUEST, _MALFORMED, "malformed_request"
        body = json.dumps(error_object(message, "invalid_request_error", code=code)).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
            f"{REQUEST_ID}: {call_context(self.headers or ()).request_id}\r\n\r\n"
        )
        return head.encode() + body

    def _unsupported_upgrade_warning(self) -> None:
        """A request that would like another protocol is answered in this one, as it may be."""

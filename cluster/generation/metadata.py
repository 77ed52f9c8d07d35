"""What stands beside a call's messages: its id in the metadata; trailers that tell who served it, and how long it took.

Of several choices, workers and stage times are those of the one that ended last: its stages, one after another, are
what the call took. A worker measures them to the end it sees: there are none of a choice that a stop string ended.
"""

import uuid
from collections.abc import Container
from dataclasses import fields

from cluster.call_context import CACHED_TOKENS, DECODE_WORKER, PREFILL_WORKER, REQUEST_ID, CallContext, is_sound_id
from cluster.errors import GenerationError, InvalidRequest, QueueFull
from cluster.generator import StageTimes
from cluster.text_generator import TextDelta

# A status message travels as a header, of which clients take some 8 KiB in all; a character of it can take 12 bytes.
_MAX_MESSAGE_CHARACTERS = 400

Metadata = tuple[tuple[str, str], ...]


def request_id_of(wanted: str, call: CallContext, *, in_flight: Container[str]) -> str:
    """What `Abort` knows a request by.

    The call's x-request-id may be in flight more than once, as when a proxy tries again: the second request gets an id
    of its own.

    Args:
        wanted: the request's own id; empty: it has none.

    Raises:
        InvalidRequest: it is no id, or is in flight.
    """
    if not wanted:
        return call.request_id if call.request_id not in in_flight else uuid.uuid4().hex
    if not is_sound_id(wanted):
        raise InvalidRequest("request_id must be 1 to 128 visible ASCII characters", param="request_id")
    if wanted in in_flight:
        raise InvalidRequest(f"a request with the id {wanted!r} is in flight", param="request_id")
    return wanted


class Trailers:
    """A call's trailers, as they become known.

    Args:
        request_id: the call's x-request-id.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._num_cached_tokens: int | None = None
        self._last: TextDelta | None = None
        self._stages: StageTimes | None = None

    def add(self, delta: TextDelta) -> None:
        if delta.stages is not None:
            self._stages = delta.stages
        if self._num_cached_tokens is None and delta.decode_worker is not None:
            self._num_cached_tokens = delta.num_cached_tokens
        # Of a choice that goes on, its worker is all there is to know.
        if self._last is None or delta.finish_reason is not None or self._last.finish_reason is None:
            self._last = delta

    def metadata(self, error: GenerationError | None = None) -> Metadata:
        """What is known by now; with an error, when to come again, if it says so."""
        trailers: dict[str, str | None] = {REQUEST_ID: self._request_id}
        if self._num_cached_tokens is not None:
            trailers[CACHED_TOKENS] = str(self._num_cached_tokens)
        if self._last is not None:
            trailers[PREFILL_WORKER] = self._last.prefill_worker
            trailers[DECODE_WORKER] = self._last.decode_worker
        if self._stages is not None:
            for stage in fields(self._stages):
                trailers[f"x-tandem-{stage.name}-ms"] = f"{getattr(self._stages, stage.name) * 1000:.3f}"
        if isinstance(error, QueueFull):
            # gRPC's own word for it, which its retries obey, and one for clients who look themselves.
            wait_ms = str(max(1, round(error.retry_after_s * 1000)))
            trailers["grpc-retry-pushback-ms"] = trailers["retry-after-ms"] = wait_ms
        return tuple((key, value) for key, value in trailers.items() if value is not None)


def status_message(error: GenerationError) -> str:
    """An error's message, of a length that a status can carry."""
    message = error.message
    return message if len(message) <= _MAX_MESSAGE_CHARACTERS else message[:_MAX_MESSAGE_CHARACTERS] + "…"

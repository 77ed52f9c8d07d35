"""Who calls, as the headers of an HTTP request or the metadata of a gRPC call say: its request id and its trace."""

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

REQUEST_ID = "x-request-id"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
AUTHORIZATION = "authorization"
# Of replies, as headers or trailers.
PREFILL_WORKER = "x-tandem-prefill-worker"
DECODE_WORKER = "x-tandem-decode-worker"
CACHED_TOKENS = "x-tandem-cached-tokens"

# What may be written into any log or header as it is: 1 to 128 visible ASCII characters.
ID_PATTERN = r"[\x21-\x7e]{1,128}"
_SOUND_ID = re.compile(ID_PATTERN)
# W3C Trace Context: version, trace id, parent id, flags; later versions may have more.
_SOUND_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-\S*)?")
_MAX_TRACESTATE = 512  # characters; the standard's least

# ASGI's headers are bytes; gRPC's metadata is text, but for keys that end in -bin.
Pairs = Iterable[tuple[str | bytes, str | bytes]]


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a caller says of its call, or what is made up for it."""

    request_id: str
    traceparent: str | None = None  # None: it continues no trace
    tracestate: str | None = None


def call_context(pairs: Pairs) -> CallContext:
    """The context of a call out of its headers (`scope["headers"]`) or metadata (`context.invocation_metadata()`).

    An id that is not sound (visible ASCII, at most 128 characters) is replaced by one made here, as is a missing one; a
    trace that is not W3C's is as if none was given.
    """
    given = first_values(pairs, (REQUEST_ID, TRACEPARENT, TRACESTATE))
    request_id, parent, state = given.get(REQUEST_ID, ""), given.get(TRACEPARENT, ""), given.get(TRACESTATE, "")
    is_traced = _SOUND_PARENT.fullmatch(parent) is not None
    return CallContext(
        request_id=request_id if is_sound_id(request_id) else uuid.uuid4().hex,
        traceparent=parent if is_traced else None,
        tracestate=state if is_traced and 0 < len(state) <= _MAX_TRACESTATE else None,
    )


def is_sound_id(given: str) -> bool:
    """Whether it may name a request."""
    return _SOUND_ID.fullmatch(given) is not None


def first_values(pairs: Pairs, names: Iterable[str]) -> dict[str, str]:
    """By name: the first value of each that is there. Names are compared as HTTP does, in any case."""
    wanted, found = set(names), dict[str, str]()
    for key, value in pairs:
        name = _text(key).lower()
        if name in wanted:
            found.setdefault(name, _text(value))
    return found


def _text(value: str | bytes) -> str:
    # Latin-1 gives every byte a character: nothing fails here, and what is no ASCII is refused by who reads it.
    return value.decode("latin-1") if isinstance(value, bytes) else value

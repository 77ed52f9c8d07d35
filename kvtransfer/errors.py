"""What goes wrong between two pools.

    TransferError                 anything below; `code` says what a caller can do about it
    ├── HandoffRefused            the holder will not: too long, queue full, draining, another model
    ├── ProtocolViolation         the peer said what it must not: a hole, an impossible count, a foreign layout
    └── PoolUnreachable           the peer's pool cannot be mapped: it died, or lives on another host

A stream that ends is no exception but an event (`StreamEnded`): the state machines expect it at any time.
"""

from enum import IntEnum


class Code(IntEnum):
    """How a hand-off ended. The numbers are google.rpc.Code's, so that they cross the wire as they are."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class TransferError(Exception):
    """A hand-off, or a part of it, failed."""

    code: Code = Code.INTERNAL

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class HandoffRefused(TransferError):
    """The holder does not take the hand-off; nothing is reserved there."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class ProtocolViolation(TransferError):
    """The peer broke the protocol: a bug in it, or another version. Nothing that it sent later counts."""

    code = Code.INTERNAL


class PoolUnreachable(TransferError):
    """The peer's pool cannot be mapped."""

    code = Code.UNAVAILABLE

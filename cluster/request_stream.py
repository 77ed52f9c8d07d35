"""What a worker says about one request, waiting for its reader.

A stream ends exactly once: with an `Output` that has a finish reason, or with an error; whatever comes later is
ignored. What arrived before the end is read before it. The buffer is bounded: a reader that stalls fills only its own.
"""

import asyncio
from collections import deque

from cluster.errors import GenerationError
from cluster.session_messages import NeedPrefill, Output


class RequestStream:
    """Messages of one request, from its session to its generator.

    Args:
        request_id: on the wire.
        max_buffered: messages that may wait for the reader.
    """

    def __init__(self, request_id: str, max_buffered: int) -> None:
        self.request_id = request_id
        self.ended = False
        self.has_output = False  # whether any has come
        self._max_buffered = max_buffered
        self._messages: deque[Output | NeedPrefill] = deque()
        self._error: GenerationError | None = None
        self._arrived = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return len(self._messages) >= self._max_buffered

    def put(self, message: Output | NeedPrefill) -> None:
        """A message has come; it ends the stream if it has a finish reason."""
        if self.ended:
            return
        if isinstance(message, Output):
            self.has_output = True
            self.ended = message.finish_reason is not None
        self._messages.append(message)
        self._arrived.set()

    def fail(self, error: GenerationError) -> None:
        """Nothing more will come, for this reason."""
        if self.ended:
            return
        self.ended = True
        self._error = error
        self._arrived.set()

    async def next(self) -> Output | NeedPrefill:
        """The next message.

        Raises:
            GenerationError: the stream ended with one.
        """
        while not self._messages:
            if self._error is not None:
                raise self._error
            assert not self.ended, f"{self.request_id} is read past its end"
            self._arrived.clear()
            await self._arrived.wait()
        return self._messages.popleft()

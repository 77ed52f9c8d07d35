"""Requests that wait for blocks, in the order in which they will get them."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.request import Request

_Key = tuple[int, bool, float, int]


class WaitingQueue:
    """By priority; within one, those first that had begun (preempted, or forks without a seat); then by arrival.

    A sorted list: to push, and to remove from its middle, moves pointers only, and there are at most some thousands.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[_Key, Request]] = []  # best last: popping it moves nothing
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in reversed(self._entries))

    @property
    def num_tokens(self) -> int:
        """Of all that wait."""
        return self._num_tokens

    def push(self, request: Request) -> None:
        insort(self._entries, (_key(request), request), key=_entry_key)
        self._num_tokens += request.num_tokens

    def peek(self) -> Request | None:
        """The next to be admitted."""
        return self._entries[-1][1] if self._entries else None

    def pop(self) -> Request:
        _, request = self._entries.pop()
        self._num_tokens -= request.num_tokens
        return request

    def remove(self, request: Request) -> None:
        """Takes out a request that is in the queue."""
        index = bisect_left(self._entries, _key(request), key=_entry_key)
        assert self._entries[index][1] is request, f"{request} is not in its place {index} in the queue"
        del self._entries[index]
        self._num_tokens -= request.num_tokens


def _key(request: Request) -> _Key:
    """Descending, since the best is last. Orders are unique, so requests themselves are never compared."""
    priority, arrival_time, sequence = request.order
    return (-priority, request.first_scheduled_time is not None, -arrival_time, -sequence)


def _entry_key(entry: tuple[_Key, Request]) -> _Key:
    return entry[0]

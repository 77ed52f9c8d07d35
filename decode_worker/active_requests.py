"""The books of a decode worker: every request and every choice that has not ended."""

import asyncio
from collections.abc import Callable, Iterator

from decode_worker.request import ActiveRequest, Choice
from worker.drain import Drain
from worker.session import Session


class ActiveRequests:
    """Every request of a decode worker until the last of its choices ends, found by engine ids and by its session.

    Args:
        out_of_time: called with a request whose deadline has passed; it is still in the books.
    """

    def __init__(self, drain: Drain, out_of_time: Callable[[ActiveRequest], None]) -> None:
        self._drain = drain
        self._out_of_time = out_of_time
        self._by_engine_id: dict[str, ActiveRequest] = {}
        self._choices: dict[str, Choice] = {}  # by engine id
        self._by_session: dict[Session, dict[str, ActiveRequest]] = {}  # by each name that the gateway may use
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(list(self._by_engine_id.values()))

    def __contains__(self, active: ActiveRequest) -> bool:
        return active.engine_id in self._by_engine_id

    def get(self, engine_id: str) -> ActiveRequest | None:
        return self._by_engine_id.get(engine_id)

    def choice(self, engine_id: str) -> Choice | None:
        return self._choices.get(engine_id)

    def find(self, session: Session, request_id: str) -> ActiveRequest | None:
        """The request that a gateway means by its own name, or by that of a choice which has not ended."""
        return self._by_session.get(session, {}).get(request_id)

    def of(self, session: Session) -> list[ActiveRequest]:
        return list(dict.fromkeys(self._by_session.get(session, {}).values()))

    def add(self, active: ActiveRequest) -> None:
        """From here on it counts as in flight, and its time runs."""
        self._by_engine_id[active.engine_id] = active
        names = self._by_session.setdefault(active.session, {})
        names[active.request_id] = active
        for choice in active.choices:
            self._choices[choice.engine_id] = choice
            names[choice.request_id] = active
        timeout_s = active.deadline - active.submitted_at
        loop = asyncio.get_running_loop()
        self._timers[active.engine_id] = loop.call_later(timeout_s, self._out_of_time, active)
        self._drain.enter()

    def remove(self, choice: Choice) -> bool:
        """Takes a choice out of the books, and with the last one its request; whether it was there."""
        if self._choices.pop(choice.engine_id, None) is None:
            return False
        active = choice.request
        active.choices.remove(choice)
        names = self._by_session[active.session]
        names.pop(choice.request_id)
        if not active.choices:
            names.pop(active.request_id, None)
            if not names:
                del self._by_session[active.session]
            del self._by_engine_id[active.engine_id]
            self._timers.pop(active.engine_id).cancel()
            self._drain.leave()
        return True

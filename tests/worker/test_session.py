"""A gateway's session: what is queued goes out in order, and a gateway that does not read is left."""

import pytest

from tandem.v1 import worker_pb2 as pb
from worker.session import MAX_BACKLOG, Session, SessionBroken


async def drain(session: Session) -> list[int]:
    return [response.load.num_running async for response in session.outgoing()]


def load(number: int) -> pb.SessionResponse:
    return pb.SessionResponse(load=pb.Load(num_running=number))


async def test_messages_leave_in_order_until_the_session_is_closed() -> None:
    session = Session()
    for number in range(3):
        session.send(load(number))
    session.close()
    session.close()
    assert await drain(session) == [0, 1, 2]


async def test_a_gateway_that_does_not_read_is_left_and_costs_no_more_memory() -> None:
    session = Session()
    for number in range(MAX_BACKLOG + 10):
        session.send(load(number))
    with pytest.raises(SessionBroken):
        await drain(session)

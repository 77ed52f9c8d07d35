"""Draining counts what is in flight; load is told on change, and together."""

import asyncio

import pytest

from gateway_end import PATIENCE_S
from tandem.v1 import worker_pb2 as pb
from worker.drain import Drain
from worker.load import LoadReporter
from worker.session import Session


async def test_draining_ends_when_the_last_one_has_left() -> None:
    drain = Drain()
    drain.enter()
    drain.enter()
    drain.begin()
    drain.begin()
    finished = asyncio.ensure_future(drain.finished(PATIENCE_S))
    drain.leave()
    await asyncio.sleep(0)
    assert not finished.done()
    drain.leave()
    async with asyncio.timeout(PATIENCE_S):
        assert await finished
    drain.enter()
    assert not await drain.finished(0)
    drain.leave()
    with pytest.raises(AssertionError, match="left more often"):
        drain.leave()


async def test_changes_are_told_together_and_only_if_something_has_changed() -> None:
    now = pb.Load(num_running=1)
    reporter = LoadReporter(lambda: pb.Load(num_running=now.num_running))
    session = Session(on_broken=lambda: None)
    reporter.add(session)
    for _ in range(5):
        now.num_running += 1
        reporter.changed()
    heard = session.outgoing()
    async with asyncio.timeout(PATIENCE_S):
        assert (await anext(heard)).load.num_running == 1  # at once
        assert (await anext(heard)).load.num_running == 6  # the five changes in one
    reporter.changed()  # but nothing has: the next message is of the next change
    now.num_running = 9
    async with asyncio.timeout(PATIENCE_S):
        assert (await anext(heard)).load.num_running == 9
    reporter.close()

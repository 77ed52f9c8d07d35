"""Workers that come, go, come back, and do not fit."""

import asyncio
import logging

import pytest

from cluster.errors import NoWorker
from cluster.worker_info import Role, WorkerLoad
from cluster.worker_link import LinkConfig, LinkState, WorkerLink, WorkerMismatch
from fake_cluster import FakeCluster, fake_cluster, request
from fake_worker import FakeWorker, continuation
from tandem.v1 import worker_pb2 as pb

A = b"a" * 16


async def until_state(cluster: FakeCluster, link: WorkerLink, state: LinkState) -> None:
    while link.state is not state:
        await cluster.membership._changed.wait()


async def retry(cluster: FakeCluster, link: WorkerLink) -> None:
    """Lets time pass until the link has tried once more and failed, or succeeded."""
    cluster.clock.advance(1.0)
    await cluster.membership._changed.wait()


async def test_members_are_described_with_their_load() -> None:
    async with fake_cluster("p0 d0") as c:
        c.workers["d0"].sessions[0].send(pb.SessionResponse(load=pb.Load(num_running=2, num_free_blocks=5)))
        while (status := c.membership.workers()[1]).load == WorkerLoad():
            await asyncio.sleep(0)
        assert status.load == WorkerLoad(num_running=2, num_free_blocks=5)
        assert status.info is not None
        assert (status.ready, status.info.worker_id, status.info.role) == (True, "d0", Role.DECODE)
        assert status.address == status.info.address == c.workers["d0"].address
        assert c.membership.model.max_model_len == 100
        assert c.membership.num_ready(Role.PREFILL) == c.membership.num_ready(Role.DECODE) == 1


async def test_ready_means_as_many_workers_of_each_role_as_asked_for() -> None:
    async with fake_cluster("d0") as c:
        await c.membership.wait_ready()
        waiting = asyncio.create_task(c.membership.wait_ready(prefill_workers=1, decode_workers=2))
        await c.join(FakeWorker("p0", Role.PREFILL))
        assert not waiting.done()
        await c.join(FakeWorker("d1"))
        await waiting


@pytest.mark.parametrize(
    ("described", "why"),
    [
        ({"fingerprint": b"\x0f"}, "has the fingerprint 0f, this cluster 66616b65"),
        ({"block_size": 16}, "has the block size 16, this cluster 4"),
        ({"vocab_size": 7}, "has the vocabulary size 7"),
        ({"max_model_len": 99}, "has the context length 99, this cluster 100"),
        ({"model_name": "else"}, "serves the model 'else', this cluster 'fake'"),
    ],
)
async def test_a_worker_that_differs_is_refused_with_what_differs(described: dict[str, object], why: str) -> None:
    async with fake_cluster("d0") as c:
        other = await c.start(FakeWorker("d1", **described))
        link = c.membership.add_worker(other.address)
        with pytest.raises(WorkerMismatch, match=f"worker d1 at {other.address} {why}"):
            await c.membership.wait_link(link)
        with pytest.raises(WorkerMismatch):
            await c.membership.wait_ready(decode_workers=2)
        status = c.membership.workers()[1]
        assert not status.ready
        assert why in (status.last_error or "")
        assert c.membership.num_ready(Role.DECODE) == 1


async def test_a_second_worker_of_the_same_name_is_refused() -> None:
    async with fake_cluster("d0") as c:
        twin = FakeWorker("d0")
        await twin.start()
        with pytest.raises(WorkerMismatch, match="calls itself d0, but so does the one at"):
            await c.membership.wait_link(c.membership.add_worker(twin.address))
        await twin.kill()


async def test_an_unknown_role_is_refused() -> None:
    async with fake_cluster("d0") as c:
        strange = await c.start(FakeWorker("x"))
        strange.description.role = pb.ROLE_UNSPECIFIED
        link = c.membership.add_worker(strange.address)
        await c.membership._changed.wait()
        assert "unknown role" in (link.last_error or "")


@pytest.mark.parametrize("ending", [False, True])
async def test_a_worker_that_is_lost_is_warned_of_unless_everything_is_ending(
    ending: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_cluster("p0 d0") as c:
        link = c.membership._links[c.workers["d0"].address]
        if ending:
            c.membership.expect_losses()
        with caplog.at_level(logging.INFO, "cluster.worker_link"):
            await c.workers["d0"].kill()
            while link.last_error is None:
                await asyncio.sleep(0)
        levels = {record.levelno for record in caplog.records if "was lost" in record.getMessage()}
        assert levels == {logging.INFO if ending else logging.WARNING}


async def test_a_worker_that_is_not_there_yet_is_found_when_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    async with fake_cluster("d0", automatic=True) as c:
        placeholder = FakeWorker("d1")
        address = await placeholder.start()
        await placeholder.kill()
        with caplog.at_level(logging.WARNING, "cluster.worker_link"):
            link = c.membership.add_worker(address)
            for _ in range(4):
                await retry(c, link)
        assert caplog.text.count(f"{address} cannot be reached") == 1  # said once, not at every retry
        await c.start(FakeWorker("d1", automatic=True), address)
        while link.state is not LinkState.READY:
            await retry(c, link)
        assert link.last_error is None
        assert c.membership.num_ready(Role.DECODE) == 2


async def test_a_restart_at_the_same_address_is_a_new_instance_and_nothing_of_the_old_one_is_left() -> None:
    async with fake_cluster("d0", automatic=True) as c:
        old = c.workers["d0"]
        old.store(A)
        while not c.membership.directory.workers_of(A):
            await asyncio.sleep(0)
        link = c.membership.add_worker(old.address)
        await old.kill()
        await until_state(c, link, LinkState.CONNECTING)
        assert not c.membership.directory.workers_of(A)
        with pytest.raises(NoWorker):
            await c.tokens(request())
        new = await c.start(FakeWorker("d0", automatic=True), old.address)
        while link.state is not LinkState.READY:
            await retry(c, link)
        assert link.info is not None
        assert link.info.instance_id == new.instance_id != old.instance_id
        assert await c.tokens(request()) == continuation([1, 2, 3], 6)
        assert c.membership.directory.num_blocks(old.instance_id) == 0


async def test_a_removed_worker_is_forgotten_by_address_or_id_and_its_connection_ends() -> None:
    async with fake_cluster("d0 d1 p0") as c:
        await c.membership.remove_worker("d0")
        await c.membership.remove_worker(c.workers["p0"].address)
        await c.membership.remove_worker("nobody")
        assert [status.info.worker_id for status in c.membership.workers() if status.info] == ["d1"]
        assert c.membership.num_ready(Role.PREFILL) == 0
        assert c.membership.session(c.workers["d0"].instance_id) is None


async def test_waiting_for_a_worker_that_is_removed_ends() -> None:
    async with fake_cluster("d0") as c:
        placeholder = FakeWorker("d1")
        address = await placeholder.start()
        await placeholder.kill()
        link = c.membership.add_worker(address)
        waiting = asyncio.create_task(c.membership.wait_link(link))
        await c.membership._changed.wait()
        await c.membership.remove_worker(address)
        with pytest.raises(NoWorker, match="was removed"):
            await waiting


async def test_a_worker_whose_kv_events_are_missing_is_shown_and_serves_all_the_same() -> None:
    async with fake_cluster("d0", automatic=True, link=LinkConfig(silent_after_s=10.0)) as c:
        await c.workers["d0"].subscribed.get()
        assert not c.membership.workers()[0].kv_events_silent
        c.clock.advance(10.0)
        assert c.membership.workers()[0].kv_events_silent
        assert await c.tokens(request()) == continuation([1, 2, 3], 6)


async def test_a_drained_worker_takes_nothing_new_and_finishes_what_it_has() -> None:
    async with fake_cluster("d0 d1") as c:
        first = asyncio.create_task(c.tokens(request()))
        at_d0 = await c.workers["d0"].next_request()
        c.workers["d0"].sessions[0].send(pb.SessionResponse(load=pb.Load(draining=True)))
        while not (load := c.membership.ledger.load(c.workers["d0"].instance_id)) or not load.draining:
            await asyncio.sleep(0)
        for _ in range(3):
            later = asyncio.create_task(c.tokens(request()))
            (await c.workers["d1"].next_request()).send_all()
            await later
        at_d0.send_all()
        assert await first == continuation([1, 2, 3], 6)


async def test_before_any_worker_is_reached_there_is_no_model() -> None:
    async with fake_cluster("") as c:
        with pytest.raises(NoWorker, match="none of the 0 workers"):
            _ = c.membership.model

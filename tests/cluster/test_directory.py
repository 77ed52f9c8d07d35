"""The directory against a dict of sets, through everything that can happen to a stream of events."""

import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.directory import NUM_SHARDS, Applied, Directory
from engine.kvcache.block_hash import BlockHash, hash_blocks, root_hash
from engine.kvcache.events import BlocksRemoved, BlocksStored, CacheCleared

ROOT = root_hash(b"model")


def chain(num_blocks: int, first: int = 0) -> list[BlockHash]:
    return hash_blocks(ROOT, range(first, first + 4 * num_blocks), 4)


def directory_of(**held: list[BlockHash]) -> Directory:
    directory = Directory()
    for worker, hashes in held.items():
        directory.begin(worker, 1, 0)
        directory.add_snapshot(worker, hashes)
    return directory


def test_longest_prefix_counts_the_leading_blocks_of_each_worker() -> None:
    hashes = chain(6)
    directory = directory_of(
        all=hashes, two=hashes[:2], tail=hashes[3:], gap=[hashes[0], hashes[2]], other=chain(3, 99)
    )
    assert directory.longest_prefix(hashes) == {"all": 6, "two": 2, "gap": 1}
    assert directory.longest_prefix(hashes[:1]) == {"all": 1, "two": 1, "gap": 1}
    assert directory.longest_prefix([]) == {}
    assert Directory().longest_prefix(hashes) == {}


def test_removing_an_unknown_block_changes_nothing_and_the_rest_of_the_batch_is_applied() -> None:
    a, b, unknown = chain(1, 0)[0], chain(1, 50)[0], chain(1, 99)[0]
    directory = directory_of(w=[a, b])
    events = [BlocksRemoved((unknown, a)), BlocksStored((unknown,))]
    assert directory.apply("w", 1, 1, events) is Applied.OK
    assert [directory.workers_of(h) for h in (a, b, unknown)] == [set(), {"w"}, {"w"}]
    directory.check_integrity()


def test_cleared_forgets_all_of_that_worker_and_of_no_other() -> None:
    hashes = chain(5)
    directory = directory_of(w=hashes, other=hashes)
    events = [BlocksStored(tuple(chain(2, 77))), CacheCleared(), BlocksStored((hashes[0],))]
    assert directory.apply("w", 2, 1, events) is Applied.OK
    assert directory.longest_prefix(hashes) == {"w": 1, "other": 5}
    assert directory.num_blocks("w") == 1
    assert directory.apply("w", 2, 2, [BlocksStored((hashes[1],))]) is Applied.OK
    assert directory.longest_prefix(hashes) == {"w": 2, "other": 5}
    directory.check_integrity()


def test_a_restarted_worker_starts_from_its_snapshot_with_a_new_watermark() -> None:
    hashes = chain(3)
    directory = directory_of(w=hashes)
    directory.apply("w", 1, 1, [])
    directory.begin("w", 7, 40)
    directory.add_snapshot("w", hashes[:1])
    assert directory.longest_prefix(hashes) == {"w": 1}
    assert directory.apply("w", 7, 41, [BlocksStored((hashes[1],))]) is Applied.OK
    assert directory.longest_prefix(hashes) == {"w": 2}


@pytest.mark.parametrize(
    ("epoch", "sequence", "events", "applied"),
    [
        (3, 11, [], Applied.OK),
        (3, 12, [], Applied.GAP),
        (3, 10, [], Applied.DUPLICATE),
        (3, 9, [], Applied.DUPLICATE),
        (2, 11, [], Applied.GAP),
        (4, 11, [], Applied.GAP),
        (4, 11, [CacheCleared()], Applied.OK),
        (5, 11, [CacheCleared(), CacheCleared()], Applied.OK),
        (4, 12, [CacheCleared()], Applied.GAP),
        (4, 1, [], Applied.GAP),
    ],
)
def test_a_batch_is_applied_only_if_it_follows_the_last_one(
    epoch: int, sequence: int, events: list[CacheCleared], applied: Applied
) -> None:
    directory = Directory()
    directory.begin("w", 3, 10)
    block = chain(1)[0]
    assert directory.apply("w", epoch, sequence, [*events, BlocksStored((block,))]) is applied
    assert directory.workers_of(block) == ({"w"} if applied is Applied.OK else set())


def test_a_heartbeat_that_tells_of_batches_that_never_came_is_a_gap() -> None:
    directory = directory_of(w=[])
    assert directory.heartbeat("w", 1, 0) is Applied.OK
    assert directory.heartbeat("w", 1, 1) is Applied.GAP
    assert directory.heartbeat("w", 2, 0) is Applied.GAP
    assert directory.heartbeat("stranger", 1, 0) is Applied.GAP


def test_events_of_an_unknown_worker_are_a_gap() -> None:
    assert Directory().apply("stranger", 1, 1, []) is Applied.GAP


def test_a_forgotten_worker_holds_nothing_at_once_and_its_blocks_leave_the_table_as_events_come_in() -> None:
    hashes = chain(500)
    directory = directory_of(gone=hashes, stays=hashes[:1])
    directory.forget("gone")
    directory.forget("gone")
    assert directory.longest_prefix(hashes) == {"stays": 1}
    assert "gone" not in directory
    assert directory.num_entries == 500
    for sequence in range(1, NUM_SHARDS + 1):
        directory.check_integrity()
        assert directory.apply("stays", 1, sequence, []) is Applied.OK
    assert directory.num_entries == 1
    directory.check_integrity()


def test_slots_are_used_again_when_workers_come_and_go() -> None:
    hashes = chain(20)
    directory = directory_of(stays=hashes)
    for restart in range(50):
        directory.begin(f"w{restart}", 1, 0)
        directory.add_snapshot(f"w{restart}", hashes)
        directory.forget(f"w{restart}")
        for _ in range(NUM_SHARDS):
            directory.heartbeat("stays", 1, 0)
    assert max(mask for shard in directory._shards for mask in shard.values()) < 8
    directory.check_integrity()


def test_a_hundred_thousand_blocks_on_two_workers_cost_less_than_160_bytes_each() -> None:
    num_blocks = 100_000
    tracemalloc.start()
    directory = Directory()
    before = tracemalloc.get_traced_memory()[0]
    for worker in ("p", "d"):
        directory.begin(worker, 1, 0)
        directory.add_snapshot(worker, (BlockHash(b"%016x" % (i * 2654435761)) for i in range(num_blocks)))
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert directory.num_entries == num_blocks
    assert used / num_blocks < 160


class DirectoryFollowsWorkers(RuleBasedStateMachine):
    """Workers store, remove, clear, restart; the way there drops, repeats and delays; the follower subscribes anew
    when told to. Whenever nothing is outstanding, the directory is exactly what the workers hold."""

    workers = ("w0", "w1", "w2")
    block_numbers = st.lists(st.integers(0, 15), max_size=4)
    worker_names = st.sampled_from(workers)

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        self.hashes = chain(16)
        self.held: dict[str, set[BlockHash]] = {w: set() for w in self.workers}
        self.mark = dict.fromkeys(self.workers, (1, 0))
        self.in_flight: dict[str, list[tuple[int, int, list[object]]]] = {w: [] for w in self.workers}
        self.last: dict[str, tuple[int, int, list[object]]] = {}
        self.must_subscribe = set(self.workers)

    def send(self, worker: str, events: list[object], *, raises_epoch: bool = False) -> None:
        epoch, sequence = self.mark[worker]
        self.mark[worker] = (epoch + raises_epoch, sequence + 1)
        self.in_flight[worker].append((*self.mark[worker], events))

    @rule(worker=worker_names, stored=block_numbers, removed=block_numbers)
    def changes(self, worker: str, stored: list[int], removed: list[int]) -> None:
        new = [self.hashes[i] for i in stored]
        gone = [self.hashes[i] for i in removed]
        self.held[worker] = (self.held[worker] | set(new)) - set(gone)
        self.send(worker, [BlocksStored(tuple(new)), BlocksRemoved(tuple(gone))])

    @rule(worker=worker_names, kept=block_numbers)
    def clears(self, worker: str, kept: list[int]) -> None:
        self.held[worker] = {self.hashes[i] for i in kept}
        self.send(worker, [CacheCleared(), BlocksStored(tuple(self.held[worker]))], raises_epoch=True)

    @rule(worker=worker_names)
    def dies(self, worker: str) -> None:
        self.directory.forget(worker)
        self.held[worker] = set()
        self.mark[worker] = (1, 0)
        self.in_flight[worker].clear()
        self.last.pop(worker, None)
        self.must_subscribe.add(worker)

    @precondition(lambda self: any(self.in_flight.values()))
    @rule(data=st.data())
    def is_lost(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([w for w in self.workers if self.in_flight[w]]))
        self.in_flight[worker].pop(0)
        # What follows the lost one cannot be the next; if nothing does, the heartbeat tells.

    @precondition(lambda self: any(self.in_flight.values()))
    @rule(data=st.data())
    def arrives(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([w for w in self.workers if self.in_flight[w]]))
        batch = self.in_flight[worker].pop(0)
        self.last[worker] = batch
        if worker not in self.must_subscribe and self.directory.apply(worker, *batch) is Applied.GAP:
            self.must_subscribe.add(worker)

    @precondition(lambda self: self.last)
    @rule(data=st.data())
    def arrives_twice(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.last)))
        if worker not in self.must_subscribe:
            assert self.directory.apply(worker, *self.last[worker]) is Applied.DUPLICATE

    @rule(worker=worker_names)
    def is_idle(self, worker: str) -> None:
        """Everything on its way has arrived or is lost; the heartbeat says what should have."""
        if worker in self.must_subscribe:
            self.subscribe(worker)
        while self.in_flight[worker]:
            if self.directory.apply(worker, *self.in_flight[worker].pop(0)) is Applied.GAP:
                self.subscribe(worker)
        if self.directory.heartbeat(worker, *self.mark[worker]) is Applied.GAP:
            self.subscribe(worker)
        for block_hash in self.hashes:
            assert (worker in self.directory.workers_of(block_hash)) == (block_hash in self.held[worker])
        assert self.directory.num_blocks(worker) == len(self.held[worker])

    def subscribe(self, worker: str) -> None:
        self.directory.begin(worker, *self.mark[worker])
        self.directory.add_snapshot(worker, self.held[worker])
        self.in_flight[worker].clear()
        self.last.pop(worker, None)
        self.must_subscribe.discard(worker)

    @invariant()
    def is_whole(self) -> None:
        self.directory.check_integrity()

    def teardown(self) -> None:
        for worker in self.workers:
            self.is_idle(worker)
        for length in range(len(self.hashes) + 1):
            for worker, held in self.directory.longest_prefix(self.hashes[:length]).items():
                assert set(self.hashes[:held]) <= self.held[worker]
                assert held == length or self.hashes[held] not in self.held[worker]


TestDirectoryFollowsWorkers = DirectoryFollowsWorkers.TestCase
TestDirectoryFollowsWorkers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

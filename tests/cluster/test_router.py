"""The router: a table of decisions, its own accounting, and hot spots simulated."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from assigned import num_assigned
from cluster.config import ClusterConfig
from cluster.directory import Directory
from cluster.errors import NoWorker
from cluster.ledger import Ledger
from cluster.plan import Plan
from cluster.router import Router, RouterConfig
from cluster.worker_info import Role, WorkerInfo, WorkerLoad
from engine.kvcache.block_hash import BlockHash, hash_blocks, root_hash

BLOCK_SIZE = 16
ROOT = root_hash(b"model")
NOW = 50.0


def worker(name: str) -> WorkerInfo:
    """Named after its role, and its host if need be: p0, d1, d1@A."""
    return WorkerInfo(
        worker_id=name,
        instance_id=name,
        role=Role.PREFILL if name.startswith("p") else Role.DECODE,
        address=f"{name}:1",
        model_name="m",
        model_path="m",
        fingerprint=b"model",
        block_size=BLOCK_SIZE,
        num_blocks=1000,
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        vocab_size=1000,
        bytes_per_block=700_000,
        dtype="float32",
        host_id=name.partition("@")[2],
    )


def router_with(names: str, config: RouterConfig | None = None) -> Router:
    config = config or RouterConfig()
    router = Router(config, Directory(), Ledger(config.recent_half_life_s))
    for name in names.split():
        router._ledger.add_worker(worker(name))
    return router


def hold(router: Router, name: str, hashes: Iterable[BlockHash]) -> None:
    directory = router._directory
    if name not in directory:
        directory.begin(name, 1, 0)
    directory.add_snapshot(name, hashes)


def hashes_of(num_tokens: int, first: int = 0) -> list[BlockHash]:
    return hash_blocks(ROOT, range(first, first + num_tokens), BLOCK_SIZE)


def names(plan: Plan) -> tuple[str, str | None, str | None, int]:
    return (
        plan.decode.worker_id,
        plan.prefill.worker_id if plan.prefill else None,
        plan.cached_on.worker_id if plan.cached_on else None,
        plan.num_cached_blocks,
    )


# Of a prompt of 1,600 tokens (100 blocks): who holds how many leading blocks, and what is decided.
@pytest.mark.parametrize(
    ("workers", "held", "max_local", "decided"),
    [
        pytest.param("p0 d0", {}, 64, ("d0", "p0", None, 0), id="nothing cached: apart"),
        pytest.param("d0", {}, 64, ("d0", None, None, 0), id="no prefill worker: local"),
        pytest.param("p0 d0", {}, 1600, ("d0", None, None, 0), id="short enough: local"),
        pytest.param("p0 d0", {}, 1599, ("d0", "p0", None, 0), id="a token too long: apart"),
        pytest.param("p0 d0", {"d0": 96}, 64, ("d0", None, None, 96), id="short rest after its own cache: local"),
        pytest.param("p0 d0", {"d0": 95}, 64, ("d0", "p0", "d0", 95), id="longer rest: apart, its history pulled"),
        pytest.param("p0 d0", {"d0": 100}, 0, ("d0", "p0", "d0", 99), id="0: always apart, one block is computed"),
        pytest.param("p0 p1 d0", {"p1": 50}, 64, ("d0", "p1", None, 50), id="prefill where it is cached"),
        pytest.param("p0 d0 d1", {"d1": 50}, 64, ("d1", "p0", "d1", 50), id="decode where it is cached"),
        pytest.param("p0 d0", {"p0": 50, "d0": 50}, 64, ("d0", "p0", None, 50), id="nobody holds more"),
        pytest.param("p0 d0", {"p0": 49, "d0": 50}, 64, ("d0", "p0", "d0", 50), id="a block is worth a pull"),
        pytest.param("d0 d1", {"d1": 99}, 64, ("d1", None, None, 99), id="no prefill worker, cached on one"),
        pytest.param("p0 d0", {"gone": 99}, 64, ("d0", "p0", None, 0), id="no member holds it"),
    ],
)  # fmt: skip
def test_plan(workers: str, held: dict[str, int], max_local: int, decided: tuple[str, str, str, int]) -> None:
    router = router_with(workers, RouterConfig(max_local_prefill_tokens=max_local))
    hashes = hashes_of(1600)
    for name, num_blocks in held.items():
        hold(router, name, hashes[:num_blocks])
    plan = router.choose(hashes, 1600, NOW)
    assert names(plan) == decided
    assert plan.num_uncached_tokens == 1600 - 16 * plan.num_cached_blocks
    assert plan.is_fallback == (workers.startswith("d") and not plan.num_cached_blocks)


# Of the same prompt, where workers are on hosts (their names' ends; none: unknown).
@pytest.mark.parametrize(
    ("workers", "held", "decided"),
    [
        pytest.param("p0@A d0@A", {}, ("d0@A", "p0@A", None, 0), id="one host: apart"),
        pytest.param("p0@A d0@B", {}, ("d0@B", None, None, 0), id="prefill worker elsewhere: local"),
        pytest.param("p0 d0@B", {}, ("d0@B", "p0", None, 0), id="unknown host: as if on the same"),
        pytest.param("p0@A d0", {}, ("d0", "p0@A", None, 0), id="unknown host of the decode worker: likewise"),
        pytest.param("p0@A p1@B d0@B", {"p0@A": 99}, ("d0@B", "p1@B", None, 0), id="cached where nobody decodes"),
        pytest.param("p0@A p1@B d0@A d1@B", {"p1@B": 50}, ("d1@B", "p1@B", None, 50), id="decode where prefill caches"),
        pytest.param("p0@A d0@A d1@B", {"d1@B": 90}, ("d1@B", None, None, 90), id="its own cache, no prefill worker"),
        pytest.param("p0@A d0@A d1@A", {"d1@A": 50}, ("d1@A", "p0@A", "d1@A", 50), id="pulled within the host"),
        pytest.param("p0@A d0@A p1@B", {"p1@B": 50}, ("d0@A", "p0@A", None, 0), id="not pulled from another host"),
        pytest.param("p0@A d0@A d1", {"d1": 50}, ("d1", "p0@A", "d1", 50), id="pulled from an unknown host"),
    ],
)  # fmt: skip
def test_blocks_go_only_between_workers_of_one_host(
    workers: str, held: dict[str, int], decided: tuple[str, str, str, int]
) -> None:
    router = router_with(workers)
    hashes = hashes_of(1600)
    for name, num_blocks in held.items():
        hold(router, name, hashes[:num_blocks])
    plan = router.choose(hashes, 1600, NOW)
    assert names(plan) == decided
    assert plan.is_fallback == (plan.prefill is None)


def test_a_prefix_on_a_busy_worker_of_another_host_is_computed_again() -> None:
    router = router_with("d0@A d1@B")
    hashes = hashes_of(1600)
    hold(router, "d1@B", hashes[:99])
    router._ledger.update_load("d1@B", WorkerLoad(num_running=40))
    assert names(router.choose(hashes, 1600, NOW)) == ("d0@A", None, None, 0)


def test_a_prefill_worker_is_overloaded_beside_those_of_its_own_host() -> None:
    router = router_with("p0@A d0@A p1@B p2@B p3@B")
    router._ledger.update_load("p0@A", WorkerLoad(num_running=50))  # far more than the others, none of which is near
    assert names(router.choose([], 1600, NOW))[:2] == ("d0@A", "p0@A")


def test_a_repair_stays_on_the_host_of_the_decode_worker() -> None:
    router = router_with("p0@A p1@B d0@A")
    hashes = hashes_of(1600)
    hold(router, "p1@B", hashes[:50])
    decode = worker("d0@A")
    assert router.choose_prefill(decode, hashes, 1600, NOW) == worker("p0@A")
    assert router.choose_prefill(decode, hashes, 1600, NOW, exclude={"p0@A"}) is None
    assert router.choose_prefill(worker("d1@B"), hashes, 1600, NOW, exclude={"p0@A"}) == worker("p1@B")


def test_a_plan_without_a_prefill_worker_is_a_fallback_only_if_it_should_have_been_apart() -> None:
    router = router_with("d0", RouterConfig(max_local_prefill_tokens=100))
    assert not router.choose(hashes_of(100), 100, NOW).is_fallback
    assert router.choose(hashes_of(101), 101, NOW).is_fallback


def test_default_length_of_a_local_prefill_is_the_configurations() -> None:
    assert RouterConfig().max_local_prefill_tokens == ClusterConfig().max_local_prefill_tokens


def test_pulling_a_prefix_that_is_cheaper_to_compute_is_left() -> None:
    router = router_with("p0 d0", RouterConfig(compute_s_per_token=1e-6))
    hashes = hashes_of(1600)
    hold(router, "d0", hashes[:90])
    assert names(router.choose(hashes, 1600, NOW))[1:] == ("p0", None, 0)


def test_a_long_cached_prefix_outweighs_a_little_load_and_not_a_lot() -> None:
    hashes = hashes_of(1600)
    for num_busy, decode in ((3, "d1"), (40, "d0")):
        router = router_with("d0 d1", RouterConfig(overload_slack=1000, pull_s_per_byte=1e-7))
        hold(router, "d1", hashes[:99])
        router._ledger.update_load("d1", WorkerLoad(num_running=num_busy))
        assert router.choose(hashes, 1600, NOW).decode.worker_id == decode


def test_a_prefix_on_a_busy_worker_is_pulled_to_an_idle_one() -> None:
    router = router_with("d0 d1")
    hashes = hashes_of(1600)
    hold(router, "d1", hashes[:99])
    router._ledger.update_load("d1", WorkerLoad(num_running=4))
    assert names(router.choose(hashes, 1600, NOW)) == ("d0", None, "d1", 99)


def test_a_full_pool_is_avoided() -> None:
    router = router_with("d0 d1")
    router._ledger.update_load("d0", WorkerLoad(num_free_blocks=3, num_cached_blocks=3, num_active_blocks=900))
    router._ledger.update_load(
        "d1", WorkerLoad(num_running=4, num_free_blocks=3, num_cached_blocks=4, num_active_blocks=900)
    )
    assert router.choose(hashes_of(112), 112, NOW).decode.worker_id == "d1"
    assert router.choose(hashes_of(96), 96, NOW).decode.worker_id == "d0"


def test_draining_and_removed_workers_are_never_chosen_nor_pulled_from() -> None:
    router = router_with("p0 p1 d0 d1")
    hashes = hashes_of(1600)
    hold(router, "p0", hashes)
    hold(router, "d0", hashes)
    router._ledger.update_load("p0", WorkerLoad(draining=True))
    router._ledger.remove_worker("d0")
    for _ in range(5):
        assert names(router.choose(hashes, 1600, NOW)) == ("d1", "p1", None, 0)
    assert router.choose_prefill(worker("d0"), hashes, 1600, NOW, exclude=["p1"]) is None
    router._ledger.update_load("p0", WorkerLoad(draining=False))
    assert router.choose(hashes, 1600, NOW).prefill == worker("p0")


def test_no_worker_says_who_is_missing() -> None:
    with pytest.raises(
        NoWorker, match=r"no decode worker is ready \(0 prefill workers are, 0 decode workers are drain"
    ):
        router_with("").choose([], 1, NOW)
    with pytest.raises(NoWorker, match="1 prefill workers are"):
        router_with("p0").choose([], 1, NOW)
    router = router_with("d0 d1")
    router._ledger.update_load("d0", WorkerLoad(draining=True))
    with pytest.raises(NoWorker, match="1 decode workers are draining, 1 tried in vain"):
        router.choose([], 1, NOW, exclude={"d1"})


def test_equals_take_turns() -> None:
    router = router_with("p0 p1 d0 d1 d2", RouterConfig(max_local_prefill_tokens=0))
    chosen = []
    for i in range(6):
        plan = router.choose([], 100, NOW)
        router._ledger.assign(f"r{i}", plan, NOW)
        router._ledger.release(f"r{i}")
        chosen.append(names(plan)[:2])
    assert [d for d, _ in chosen] == ["d0", "d1", "d2"] * 2
    assert Counter(p for _, p in chosen) == {"p0": 3, "p1": 3}


def test_a_repair_takes_the_prefill_worker_that_caches_most_among_those_not_tried() -> None:
    router = router_with("p0 p1 p2 d0")
    hashes = hashes_of(1600)
    hold(router, "p2", hashes[:50])
    hold(router, "p0", hashes[:90])
    chosen = router.choose_prefill(worker("d0"), hashes, 1600, NOW, exclude={"p0"})
    assert chosen is not None
    assert chosen.worker_id == "p2"
    assert router.choose_prefill(worker("d0"), hashes, 1600, NOW, exclude={"p0", "p1", "p2"}) is None


def test_a_burst_spreads_before_any_report_of_load_arrives() -> None:
    router = router_with("p0 p1 d0 d1 d2")
    counts: Counter[str] = Counter()
    for i in range(60):
        plan = router.choose(hashes_of(200, first=1000 * i), 200, NOW)
        router._ledger.assign(f"r{i}", plan, NOW)
        counts.update([plan.decode.worker_id, plan.prefills.worker_id])
    assert counts == {"p0": 30, "p1": 30, "d0": 20, "d1": 20, "d2": 20}


def test_a_late_report_does_not_hide_what_was_assigned_since() -> None:
    router = router_with("d0 d1", RouterConfig(recent_request_s=0.0))
    for i in range(4):
        router._ledger.assign(f"r{i}", replace(router.choose([], 10, NOW), decode=worker("d0")), NOW)
    router._ledger.update_load("d0", WorkerLoad(num_running=1))  # measured before the others arrived
    router._ledger.update_load("d1", WorkerLoad(num_running=3))
    assert router.choose([], 10, NOW).decode.worker_id == "d1"
    router._ledger.update_load("d1", WorkerLoad(num_running=6))  # another gateway's
    assert router.choose([], 10, NOW).decode.worker_id == "d0"


def test_what_has_ended_counts_no_more_also_before_the_next_report() -> None:
    router = router_with("d0 d1", RouterConfig(recent_request_s=0.0))
    for i in range(6):
        router._ledger.assign(f"r{i}", replace(router.choose([], 10, NOW), decode=worker("d0")), NOW)
    router._ledger.update_load("d0", WorkerLoad(num_running=6, num_waiting_tokens=60))
    router._ledger.update_load("d1", WorkerLoad(num_running=2))
    for i in range(6):
        router._ledger.release(f"r{i}")
    assert router.choose([], 10, NOW).decode.worker_id == "d0"
    router._ledger.check_integrity()


def test_accounts_are_settled_whatever_happens_on_the_way() -> None:
    rng = random.Random(7)
    router = router_with("p0 p1 d0 d1")
    alive = {"p0", "p1", "d0", "d1"}
    running: list[str] = []  # once for each choice
    for i in range(2000):
        match rng.randrange(6):
            case 0 | 1 if alive & {"d0", "d1"}:
                num_tokens, num_choices = rng.randrange(1, 300), rng.choice([1, 1, 1, 2, 5])
                plan = router.choose(hashes_of(num_tokens), num_tokens, NOW)
                router._ledger.assign(f"r{i}", plan, NOW, num_choices)
                running += [f"r{i}"] * num_choices
            case 2 if running:
                router._ledger.first_token(rng.choice(running))
            case 3 if running:
                router._ledger.reassign_prefill(
                    rng.choice(running), router.choose_prefill(worker("d0"), [], 5, NOW), NOW
                )
            case 4 if running:
                ended = running.pop(rng.randrange(len(running)))
                router._ledger.release(ended)
                if ended not in running:
                    router._ledger.release(ended)
            case 5 if rng.random() < 0.3:
                name = rng.choice(["p0", "p1", "d0", "d1"])
                if name in alive:
                    alive.remove(name)
                    router._ledger.remove_worker(name)
                else:  # the very same instance, connected again
                    alive.add(name)
                    router._ledger.add_worker(worker(name))
        router._ledger.check_integrity()
        assert num_assigned(router._ledger) == len(running)
    for request_id in running:
        router._ledger.release(request_id)
    router._ledger.check_integrity()
    assert all(w.num_requests == w.num_tokens == 0 for w in router._ledger.accounts.values())


# --- hot spots


def serve(
    router: Router, prompts: Iterable[list[int]], *, num_concurrent: int, seed: int = 1
) -> tuple[Counter[str], float]:
    """Serves prompts, so many at a time; each is cached where it was served. Requests by decode worker, hit rate."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    running: list[tuple[str, Plan, list[BlockHash]]] = []
    num_hits = num_blocks = 0
    now = NOW
    for i, token_ids in enumerate(prompts):
        now += 0.01
        hashes = hash_blocks(ROOT, token_ids, BLOCK_SIZE)
        plan = router.choose(hashes, len(token_ids), now)
        router._ledger.assign(f"r{i}", plan, now)
        counts[plan.decode.worker_id] += 1
        num_hits += plan.num_cached_blocks
        num_blocks += len(hashes)
        running.append((f"r{i}", plan, hashes))
        while len(running) > num_concurrent - 1:
            request_id, ended, held = running.pop(rng.randrange(len(running)))
            router._ledger.release(request_id)
            hold(router, ended.decode.instance_id, held)
            hold(router, ended.prefills.instance_id, held)
    return counts, num_hits / num_blocks


@pytest.mark.parametrize("num_concurrent", [1, 4, 16, 100])
@pytest.mark.parametrize("others", ["", "p0 p1"], ids=["local", "apart"])
def test_a_hundred_requests_that_share_their_first_block_alone_spread(num_concurrent: int, others: str) -> None:
    router = router_with(f"d0 d1 d2 d3 {others}", RouterConfig(max_local_prefill_tokens=0))
    hot = list(range(BLOCK_SIZE))
    prompts = [hot + [1000 * (i + 1) + j for j in range(100)] for i in range(100)]
    counts, _ = serve(router, prompts, num_concurrent=num_concurrent)
    assert max(counts.values()) <= 1.5 * 25
    assert len(counts) == 4


def test_a_long_prefix_that_all_requests_share_spreads_under_load() -> None:
    router = router_with("d0 d1 d2 d3")
    hot = list(range(2048))
    prompts = [hot + [10_000 * (i + 1) + j for j in range(40)] for i in range(400)]
    counts, hit_rate = serve(router, prompts, num_concurrent=64)
    assert max(counts.values()) <= 1.5 * 100
    assert hit_rate > 0.8  # of at most 0.84: the first 64 come before anything is cached


def test_conversations_stay_where_their_history_is() -> None:
    rng = random.Random(3)
    router = router_with("d0 d1 d2 d3")
    histories = [[100_000 * c + j for j in range(200)] for c in range(24)]
    prompts = []
    for _ in range(240):
        history = histories[rng.randrange(24)]
        history += [rng.randrange(10**6, 10**7) for _ in range(50)]
        prompts.append(list(history))
    counts, hit_rate = serve(router, prompts, num_concurrent=8)
    assert max(counts.values()) <= 1.5 * 60
    assert hit_rate > 0.75


def test_one_runaway_worker_does_not_switch_off_affinity_for_the_others() -> None:
    def hit_rate(runaway_load: int) -> tuple[Counter[str], float]:
        rng = random.Random(5)
        router = router_with("d0 d1 d2 d3")
        router._ledger.update_load("d0", WorkerLoad(num_running=runaway_load))
        histories = [[100_000 * c + j for j in range(300)] for c in range(24)]
        prompts = [histories[rng.randrange(24)] + [10**7 + i] for i in range(300)]
        return serve(router, prompts, num_concurrent=6)

    counts, rate = hit_rate(1000)
    assert counts["d0"] == 0
    assert rate >= hit_rate(0)[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_local_prefill_tokens", -1),
        ("compute_s_per_token", -1.0),
        ("pull_s_per_byte", float("nan")),
        ("recent_half_life_s", 0.0),
        ("overload_factor", 0.5),
        ("overload_slack", -1),
    ],
)
def test_a_senseless_configuration_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must .*not {value}"):
        RouterConfig(**{name: value})

"""Where a request goes: the decode worker, who prefills, and whose cache is pulled instead of computed again.

Every way to serve a request is an estimate in seconds: tokens nobody caches · time to compute one, bytes to move · time
to move one, and the work that waits there already. The least wins; the cache alone never does, so a prefix that all
requests share spreads over the workers as soon as the worker that has it is busier than recomputing is long. Two rules
stand above the estimate:

- A short uncached rest (`max_local_prefill_tokens`) is prefilled on the decode worker itself; a longer one on a prefill
  worker if any is alive. Without one it is local all the same, and the plan says that it was a fallback.
- A worker with far more requests in flight than the *median* of its role is passed over, whatever it caches. The
  median, because one runaway worker moves a mean and would switch off affinity for all the others.

A worker's own reports of load lag behind. So the router counts what it has assigned itself, from `assign` until
`release` (`first_token` ends the prefill's share), and takes a report as the load of then plus what it has assigned
since. Requests that ended a moment ago still weigh a little, halving every few seconds: equals take turns, and a cached
block or two is no reason to send everything to one place.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from cluster.directory import Directory
from cluster.errors import NoWorker
from cluster.worker_info import Role, WorkerInfo, WorkerLoad
from engine.kvcache.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What the estimate is made of. Only ratios matter: the defaults are those of a small model on a CPU."""

    max_local_prefill_tokens: int = 64  # 0: always apart, if there is a prefill worker
    compute_s_per_token: float = 1e-3
    pull_s_per_byte: float = 2.5e-10
    handoff_s: float = 0.01  # opening one, whatever it moves
    request_s: float = 0.05  # what a request in flight costs one that joins it
    recent_request_s: float = 0.005  # what one that ended just now still counts
    recent_half_life_s: float = 10.0
    full_pool_s: float = 5.0  # what waiting for blocks of a full pool is reckoned
    overload_factor: float = 1.5  # passed over: more requests in flight than factor · median + slack
    overload_slack: int = 4

    def __post_init__(self) -> None:
        for name in ("max_local_prefill_tokens", "overload_slack"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        times = ("compute_s_per_token", "pull_s_per_byte", "handoff_s", "request_s", "recent_request_s", "full_pool_s")
        for name in times:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite time, not {getattr(self, name)}")
        if not self.recent_half_life_s > 0:
            raise ValueError(f"recent_half_life_s must be above 0, not {self.recent_half_life_s}")
        if not self.overload_factor >= 1:
            raise ValueError(f"overload_factor must be at least 1, not {self.overload_factor}")


@dataclass(frozen=True, slots=True)
class Plan:
    """Where one request goes."""

    decode: WorkerInfo
    prefill: WorkerInfo | None  # None: on the decode worker itself
    cached_on: WorkerInfo | None  # a worker that holds a longer prefix than who prefills
    num_cached_blocks: int  # leading blocks that nobody needs to compute: on `cached_on`, or else on who prefills
    num_uncached_tokens: int  # to be computed
    is_fallback: bool = False  # local for want of a prefill worker

    @property
    def prefills(self) -> WorkerInfo:
        """Who computes the prompt."""
        return self.prefill or self.decode


@dataclass(slots=True)
class _Worker:
    """What the router knows of one worker."""

    info: WorkerInfo
    load: WorkerLoad
    # Assigned by this router and not released.
    num_requests: int = 0
    num_tokens: int = 0  # to be prefilled
    # The same at the time of the last report.
    num_requests_reported: int = 0
    num_tokens_reported: int = 0
    # Requests assigned lately, halving with time.
    recent: float = 0.0
    recent_at: float = 0.0
    last_chosen: int = 0  # turn

    @property
    def requests(self) -> int:
        """In flight: what was reported and what has been assigned since, and never less than what is known here."""
        since = self.num_requests - self.num_requests_reported
        return max(self.num_requests, self.load.num_requests + since)

    @property
    def tokens(self) -> int:
        """Waiting to be prefilled, likewise."""
        since = self.num_tokens - self.num_tokens_reported
        return max(self.num_tokens, self.load.num_waiting_tokens + since)


@dataclass(slots=True)
class _Assignment:
    """What a request counts, and where; None: nowhere any more."""

    decode: str | None
    prefill: str | None  # the decode worker's id if local
    num_tokens: int  # to be prefilled


class Router:
    """Chooses, and accounts for what it chose. Workers are named by their instance id."""

    def __init__(self, config: RouterConfig, directory: Directory) -> None:
        self.config = config
        self._directory = directory
        self._workers: dict[str, _Worker] = {}
        self._assignments: dict[str, _Assignment] = {}
        self._turn = 0

    # --- who is there

    def add_worker(self, info: WorkerInfo) -> None:
        """A worker is ready."""
        self._workers[info.instance_id] = _Worker(info, WorkerLoad())

    def remove_worker(self, instance_id: str) -> None:
        """A worker is gone. Requests that were there are released later, and must not count then. Idempotent."""
        if self._workers.pop(instance_id, None) is None:
            return
        for assignment in self._assignments.values():
            if assignment.prefill == instance_id:
                assignment.prefill = None
            if assignment.decode == instance_id:
                assignment.decode = None

    def update_load(self, instance_id: str, load: WorkerLoad) -> None:
        """A worker's own report; one of a worker that is gone means nothing."""
        worker = self._workers.get(instance_id)
        if worker is not None:
            worker.load = load
            worker.num_requests_reported = worker.num_requests
            worker.num_tokens_reported = worker.num_tokens

    def load(self, instance_id: str) -> WorkerLoad | None:
        """What the worker last reported; None if it is not there."""
        worker = self._workers.get(instance_id)
        return worker.load if worker else None

    def num_alive(self, role: Role) -> int:
        """Workers of a role that take new requests."""
        return len(self._alive(role, ()))

    # --- choosing

    def choose(
        self, block_hashes: Sequence[BlockHash], num_tokens: int, now: float, *, exclude: Collection[str] = ()
    ) -> Plan:
        """The best plan for a request of `num_tokens` tokens.

        Args:
            block_hashes: of its full blocks, in order.
            exclude: instance ids of workers that have been tried.

        Raises:
            NoWorker: no decode worker is left; says who is there.
        """
        decodes = self._alive(Role.DECODE, exclude)
        prefills = self._alive(Role.PREFILL, exclude)
        if not decodes:
            raise NoWorker(self._who_is_missing(exclude))
        held = self._held(block_hashes, num_tokens, exclude)
        prefills = self._not_overloaded(prefills)
        candidates = (
            candidate
            for decode in self._not_overloaded(decodes)
            for candidate in self._plans(decode, prefills, held, num_tokens, now)
        )
        return min(candidates, key=lambda candidate: candidate[0])[1]

    def choose_prefill(
        self, block_hashes: Sequence[BlockHash], num_tokens: int, now: float, *, exclude: Collection[str] = ()
    ) -> WorkerInfo | None:
        """Another prefill worker for a request whose own was lost; None if there is none."""
        held = self._held(block_hashes, num_tokens, exclude)
        candidates = self._not_overloaded(self._alive(Role.PREFILL, exclude))

        def key(worker: _Worker) -> tuple[float, int, str]:
            cached = held.get(worker.info.instance_id, 0) * worker.info.block_size
            return (
                (num_tokens - cached) * self.config.compute_s_per_token + self._load_s(worker, now),
                worker.last_chosen,
                worker.info.instance_id,
            )

        return min(candidates, key=key).info if candidates else None

    def _plans(
        self, decode: _Worker, prefills: Iterable[_Worker], held: dict[str, int], num_tokens: int, now: float
    ) -> Iterable[tuple[tuple[float, int, int, str], Plan]]:
        """Each way to serve the request on `decode`, with what it is compared by."""
        config, info = self.config, decode.info
        own_blocks = held.get(info.instance_id, 0)
        decode_s = self._load_s(decode, now) + self._full_pool_s(decode, num_tokens, own_blocks)
        prefills = list(prefills)
        is_short = num_tokens - own_blocks * info.block_size <= config.max_local_prefill_tokens
        for prefill in [None] if is_short or not prefills else prefills:
            prefiller = prefill or decode
            cached_on, num_cached, pulled = self._pull(prefiller.info, held)
            num_handoffs = int(cached_on is not None)
            if prefill is not None:
                pulled += -(-num_tokens // info.block_size) - own_blocks
                num_handoffs += 1
            uncached = num_tokens - num_cached * info.block_size
            seconds = (
                uncached * config.compute_s_per_token
                + pulled * info.bytes_per_block * config.pull_s_per_byte
                + num_handoffs * config.handoff_s
                + decode_s
                + (self._load_s(prefill, now) if prefill else 0.0)
            )
            turn = prefill.last_chosen if prefill else 0
            plan = Plan(
                decode=info,
                prefill=prefill.info if prefill else None,
                cached_on=cached_on,
                num_cached_blocks=num_cached,
                num_uncached_tokens=uncached,
                is_fallback=prefill is None and not is_short,
            )
            yield (seconds, decode.last_chosen, turn, info.instance_id), plan

    def _pull(self, prefiller: WorkerInfo, held: dict[str, int]) -> tuple[WorkerInfo | None, int, int]:
        """Whether a longer prefix is worth pulling to who prefills: from whom, blocks cached then, blocks moved."""
        own = held.get(prefiller.instance_id, 0)
        others = [key for key in held if key != prefiller.instance_id]
        longest = max(others, key=lambda key: (held[key], key), default=None)
        if longest is None or held[longest] <= own:
            return None, own, 0
        moved = held[longest] - own
        moved_s = self.config.handoff_s + moved * prefiller.bytes_per_block * self.config.pull_s_per_byte
        if moved_s >= moved * prefiller.block_size * self.config.compute_s_per_token:
            return None, own, 0
        return self._workers[longest].info, held[longest], moved

    def _held(self, block_hashes: Sequence[BlockHash], num_tokens: int, exclude: Collection[str]) -> dict[str, int]:
        """Usable leading blocks by worker: of workers that are there, and short of the last token (it is computed)."""
        if not self._workers:
            return {}
        block_size = next(iter(self._workers.values())).info.block_size
        usable = block_hashes[: (num_tokens - 1) // block_size]
        return {
            key: blocks
            for key, blocks in self._directory.longest_prefix(usable).items()
            if key in self._workers and not self._workers[key].load.draining and key not in exclude
        }

    def _alive(self, role: Role, exclude: Collection[str]) -> list[_Worker]:
        return [
            worker
            for key, worker in self._workers.items()
            if worker.info.role is role and not worker.load.draining and key not in exclude
        ]

    def _not_overloaded(self, workers: list[_Worker]) -> list[_Worker]:
        if len(workers) < 2:
            return workers
        limit = self.config.overload_factor * median_low(w.requests for w in workers) + self.config.overload_slack
        return [worker for worker in workers if worker.requests <= limit]

    def _load_s(self, worker: _Worker, now: float) -> float:
        config = self.config
        return (
            worker.tokens * config.compute_s_per_token
            + worker.requests * config.request_s
            + self._recent(worker, now) * config.recent_request_s
        )

    def _full_pool_s(self, worker: _Worker, num_tokens: int, own_blocks: int) -> float:
        needed = -(-num_tokens // worker.info.block_size) - own_blocks
        load = worker.load
        if not load.num_free_blocks and not load.num_cached_blocks and not load.num_active_blocks:
            return 0.0  # not reported yet
        return self.config.full_pool_s if needed > load.num_free_blocks + load.num_cached_blocks else 0.0

    def _recent(self, worker: _Worker, now: float) -> float:
        return worker.recent * math.pow(0.5, (now - worker.recent_at) / self.config.recent_half_life_s)

    def _who_is_missing(self, exclude: Collection[str]) -> str:
        tried = f", {len(exclude)} tried in vain" if exclude else ""
        draining = sum(w.info.role is Role.DECODE and w.load.draining for w in self._workers.values())
        return (
            f"no decode worker is ready ({self.num_alive(Role.PREFILL)} prefill workers are, "
            f"{draining} decode workers are draining{tried})"
        )

    # --- accounting

    def assign(self, request_id: str, plan: Plan, now: float) -> None:
        """The request goes where `plan` says; it counts there until `release`."""
        assert request_id not in self._assignments, f"{request_id} is assigned already"
        self._turn += 1
        assignment = _Assignment(plan.decode.instance_id, plan.prefills.instance_id, plan.num_uncached_tokens)
        self._assignments[request_id] = assignment
        for key in {plan.decode.instance_id, plan.prefills.instance_id}:
            self._change(key, requests=1)
            self._chosen(key, now)
        self._change(plan.prefills.instance_id, tokens=plan.num_uncached_tokens)

    def reassign_prefill(self, request_id: str, prefill: WorkerInfo | None, now: float) -> None:
        """Another prefill worker (None: the decode worker) computes what the first one owed."""
        assignment = self._assignments[request_id]
        self.first_token(request_id)
        key = prefill.instance_id if prefill else assignment.decode
        if key is not None and key in self._workers:
            assignment.prefill = key
            self._change(key, requests=int(key != assignment.decode), tokens=assignment.num_tokens)
            self._turn += 1
            self._chosen(key, now)

    def first_token(self, request_id: str) -> None:
        """The prefill's share has ended. Idempotent."""
        assignment = self._assignments.get(request_id)
        if assignment is not None and assignment.prefill is not None:
            is_apart = assignment.prefill != assignment.decode
            self._change(assignment.prefill, requests=-int(is_apart), tokens=-assignment.num_tokens)
            assignment.prefill = None

    def release(self, request_id: str) -> None:
        """The request has ended, whichever way. Idempotent."""
        self.first_token(request_id)
        assignment = self._assignments.pop(request_id, None)
        if assignment is not None and assignment.decode is not None:
            self._change(assignment.decode, requests=-1)

    @property
    def num_assigned(self) -> int:
        """Requests in flight."""
        return len(self._assignments)

    def _change(self, instance_id: str, *, requests: int = 0, tokens: int = 0) -> None:
        worker = self._workers[instance_id]
        worker.num_requests += requests
        worker.num_tokens += tokens

    def _chosen(self, instance_id: str, now: float) -> None:
        worker = self._workers[instance_id]
        worker.last_chosen = self._turn
        worker.recent = self._recent(worker, now) + 1.0
        worker.recent_at = now

    def check_integrity(self) -> None:
        """Proves that what is assigned to the workers is what requests hold; for tests."""
        for key, worker in self._workers.items():
            held = [a for a in self._assignments.values() if a.decode == key]
            pulled = [a for a in self._assignments.values() if a.prefill == key]
            requests = len(held) + sum(a.decode != key for a in pulled)
            tokens = sum(a.num_tokens for a in pulled)
            assert worker.num_requests == requests, f"{key} counts {worker.num_requests} requests, not {requests}"
            assert worker.num_tokens == tokens, f"{key} counts {worker.num_tokens} tokens, not {tokens}"

"""Where a request goes: the decode worker, who prefills, and whose cache is pulled instead of computed again.

Every way to serve a request is an estimate in seconds: tokens nobody caches · time to compute one, bytes to move · time
to move one, and the work that waits there already. The least wins; the cache alone never does, so a prefix that all
requests share spreads over the workers as soon as the worker that has it is busier than recomputing is long. Three
rules stand above the estimate:

- Blocks go only between workers of one host. A decode worker is handed prompts by the prefill workers beside it, and a
  cached prefix is pulled from there, or not at all.
- A short uncached rest (`max_local_prefill_tokens`) is prefilled on the decode worker itself; a longer one on a prefill
  worker if any is alive there. Without one it is local all the same, and the plan says that it was a fallback.
- A worker with far more requests in flight than the *median* of its role is passed over, whatever it caches. The
  median, because one runaway worker moves a mean and would switch off affinity for all the others.

How busy a worker is, the `Ledger` knows. Requests assigned a moment ago weigh a little even when they have ended:
equals take turns, and a cached block or two is no reason to send everything to one place.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from cluster.config import DEFAULT_MAX_LOCAL_PREFILL_TOKENS
from cluster.directory import Directory
from cluster.errors import NoWorker
from cluster.ledger import Account, Ledger
from cluster.plan import Plan
from cluster.worker_info import Role, WorkerInfo
from engine.kvcache.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What the estimate is made of. Only ratios matter: the defaults are those of a small model on a CPU."""

    max_local_prefill_tokens: int = DEFAULT_MAX_LOCAL_PREFILL_TOKENS  # 0: always apart, if there is a prefill worker
    compute_s_per_token: float = 1e-3
    pull_s_per_byte: float = 2.5e-10
    handoff_s: float = 0.01  # opening one, whatever it moves
    request_s: float = 0.05  # what a request in flight costs one that joins it
    recent_request_s: float = 0.005  # what one assigned just now counts beside, and for a while after it has ended
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


class Router:
    """Chooses, from what the directory and the ledger say; it keeps nothing itself."""

    def __init__(self, config: RouterConfig, directory: Directory, ledger: Ledger) -> None:
        self.config = config
        self._directory = directory
        self._ledger = ledger

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
        candidates = (
            candidate
            for decode in self._not_overloaded(decodes)
            for candidate in self._plans(decode, self._beside(decode.info, prefills), held, num_tokens, now)
        )
        return min(candidates, key=lambda candidate: candidate[0])[1]

    def choose_prefill(
        self,
        decode: WorkerInfo,
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
        now: float,
        *,
        exclude: Collection[str] = (),
    ) -> WorkerInfo | None:
        """Another prefill worker for a request of `decode` whose own was lost; None if there is none beside it."""
        held = self._held(block_hashes, num_tokens, exclude)
        candidates = self._beside(decode, self._alive(Role.PREFILL, exclude))

        def key(worker: Account) -> tuple[float, int, str]:
            cached = held.get(worker.info.instance_id, 0) * worker.info.block_size
            return (
                (num_tokens - cached) * self.config.compute_s_per_token + self._load_s(worker, now),
                worker.last_chosen,
                worker.info.instance_id,
            )

        return min(candidates, key=key).info if candidates else None

    def _plans(
        self, decode: Account, prefills: Sequence[Account], held: dict[str, int], num_tokens: int, now: float
    ) -> Iterable[tuple[tuple[float, int, int, str], Plan]]:
        """Each way to serve the request on `decode`, with what it is compared by."""
        config, info = self.config, decode.info
        own_blocks = held.get(info.instance_id, 0)
        decode_s = self._load_s(decode, now) + self._full_pool_s(decode, num_tokens, own_blocks)
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
        accounts = self._ledger.accounts
        others = [
            key for key in held if key != prefiller.instance_id and prefiller.can_exchange_with(accounts[key].info)
        ]
        longest = max(others, key=lambda key: (held[key], key), default=None)
        if longest is None or held[longest] <= own:
            return None, own, 0
        moved = held[longest] - own
        moved_s = self.config.handoff_s + moved * prefiller.bytes_per_block * self.config.pull_s_per_byte
        if moved_s >= moved * prefiller.block_size * self.config.compute_s_per_token:
            return None, own, 0
        return accounts[longest].info, held[longest], moved

    def _held(self, block_hashes: Sequence[BlockHash], num_tokens: int, exclude: Collection[str]) -> dict[str, int]:
        """Usable leading blocks by worker: of workers that are there, and short of the last token (it is computed)."""
        if not self._ledger.accounts:
            return {}
        block_size = next(iter(self._ledger.accounts.values())).info.block_size
        usable = block_hashes[: (num_tokens - 1) // block_size]
        return {
            key: blocks
            for key, blocks in self._directory.longest_prefix(usable).items()
            if key in self._ledger.accounts and not self._ledger.accounts[key].load.draining and key not in exclude
        }

    def _alive(self, role: Role, exclude: Collection[str]) -> list[Account]:
        return [
            worker
            for key, worker in self._ledger.accounts.items()
            if worker.info.role is role and not worker.load.draining and key not in exclude
        ]

    def _beside(self, decode: WorkerInfo, prefills: Iterable[Account]) -> list[Account]:
        """Those that can hand blocks to `decode`, without the overloaded among them."""
        return self._not_overloaded([p for p in prefills if decode.can_exchange_with(p.info)])

    def _not_overloaded(self, workers: list[Account]) -> list[Account]:
        if len(workers) < 2:
            return workers
        limit = self.config.overload_factor * median_low(w.requests for w in workers) + self.config.overload_slack
        return [worker for worker in workers if worker.requests <= limit]

    def _load_s(self, worker: Account, now: float) -> float:
        config = self.config
        return (
            worker.tokens * config.compute_s_per_token
            + worker.requests * config.request_s
            + self._ledger.recent(worker, now) * config.recent_request_s
        )

    def _full_pool_s(self, worker: Account, num_tokens: int, own_blocks: int) -> float:
        needed = -(-num_tokens // worker.info.block_size) - own_blocks
        load = worker.load
        if not load.num_free_blocks and not load.num_cached_blocks and not load.num_active_blocks:
            return 0.0  # not reported yet
        return self.config.full_pool_s if needed > load.num_free_blocks + load.num_cached_blocks else 0.0

    def _who_is_missing(self, exclude: Collection[str]) -> str:
        tried = f", {len(exclude)} tried in vain" if exclude else ""
        draining = sum(w.info.role is Role.DECODE and w.load.draining for w in self._ledger.accounts.values())
        return (
            f"no decode worker is ready ({len(self._alive(Role.PREFILL, ()))} prefill workers are, "
            f"{draining} decode workers are draining{tried})"
        )

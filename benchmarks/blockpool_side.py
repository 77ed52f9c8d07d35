"""One side of `blockpool`: a process that runs requests through a block pool when told to, and answers with times.

Run by path, by the interpreter that has the pool: `python blockpool_side.py ours` or `… vllm`. On its input come lines
of JSON, its setup and then jobs; it answers each with a line of `RESULT` and JSON: of a job, seconds by phase. Nothing
is imported that the other side lacks.
"""

import gc
import importlib
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

# What a request costs its pool, in the order of its life.
PHASES = ("hash", "allocate", "register", "free", "events")

MARK = "RESULT "


class Side(Protocol):
    """A pool, and one request at a time in it."""

    def hash(self, token_ids: list[int]) -> None:
        """Names all full blocks of a new request."""
        ...

    def allocate(self, num_blocks: int) -> None: ...

    def register(self) -> None:
        """Makes all of its blocks findable."""
        ...

    def free(self) -> None: ...

    def events(self) -> None:
        """Takes what a directory of caches is told."""
        ...


class Ours:
    """engine.kvcache, as the scheduler calls it."""

    def __init__(self, num_blocks: int, block_size: int, **unused: Any) -> None:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        block_hash = importlib.import_module("engine.kvcache.block_hash")
        self._extend_hashes = block_hash.extend_hashes
        self._root = block_hash.root_hash(bytes(16))
        self.pool = importlib.import_module("engine.kvcache.block_pool").BlockPool(num_blocks)
        self._block_size = block_size

    def hash(self, token_ids: list[int]) -> None:
        self._hashes: list[bytes] = []
        self._extend_hashes(self._hashes, self._root, token_ids, self._block_size)

    def allocate(self, num_blocks: int) -> None:
        self._table: list[int] = self.pool.allocate(num_blocks)

    def register(self) -> None:
        # As in KVCacheManager.cache_blocks.
        table, hashes = self._table, self._hashes
        for index in range(len(table)):
            self.pool.register(table[index], hashes[index], table[index - 1] if index > 0 else None, 0)

    def free(self) -> None:
        self.pool.free(self._table)

    def events(self) -> None:
        self.pool.take_events()


class Vllm:
    """vLLM's BlockPool, with its default hash; called as its KVCacheManager does."""

    def __init__(self, num_blocks: int, block_size: int, *, events: bool, hash_name: str, **unused: Any) -> None:
        cache = importlib.import_module("vllm.v1.core.kv_cache_utils")
        hash_function = importlib.import_module("vllm.utils.hashing").get_hash_fn_by_name(hash_name)
        cache.init_none_hash(hash_function)
        self._hasher = cache.get_request_block_hasher(block_size, hash_function)
        self._request_type = importlib.import_module("vllm.v1.request").Request
        self._params = importlib.import_module("vllm").SamplingParams(max_tokens=1)
        pool_type = importlib.import_module("vllm.v1.core.block_pool").BlockPool
        self.pool = pool_type(num_blocks, True, block_size, enable_kv_cache_events=events)
        self._block_size = block_size

    def new_request(self, token_ids: list[int]) -> None:
        """Not timed: most of what it makes has nothing to do with the pool."""
        self._request = self._request_type("request", token_ids, self._params, None)

    def hash(self, token_ids: list[int]) -> None:
        self._request.block_hashes.extend(self._hasher(self._request))

    def allocate(self, num_blocks: int) -> None:
        self._blocks: list[Any] = self.pool.get_new_blocks(num_blocks)

    def register(self) -> None:
        self.pool.cache_full_blocks(self._request, self._blocks, 0, len(self._blocks), self._block_size, 0)

    def free(self) -> None:
        self.pool.free_blocks(reversed(self._blocks))

    def events(self) -> None:
        self.pool.take_events()


def run(side: Side, *, seed: int, num_requests: int, num_blocks: int, block_size: int) -> dict[str, list[float]]:
    """Seconds of each phase of each of the requests, whose tokens are new to the pool."""
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    generator = random.Random(seed)
    for _ in range(num_requests):
        token_ids = generator.choices(range(50_000), k=num_blocks * block_size)
        if isinstance(side, Vllm):
            side.new_request(token_ids)
        calls: list[Callable[[], None]] = [
            lambda tokens=token_ids: side.hash(tokens),  # type: ignore[misc]
            lambda: side.allocate(num_blocks),
            side.register,
            side.free,
            side.events,
        ]
        for phase, call in zip(PHASES, calls, strict=True):
            began = time.perf_counter()
            call()
            seconds[phase].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    kind: type[Ours] | type[Vllm] = {"ours": Ours, "vllm": Vllm}[sys.argv[1]]
    setup = json.loads(sys.stdin.readline())
    num_blocks, block_size = setup["num_blocks"], setup["block_size"]
    side = kind(setup["pool_blocks"], block_size, events=setup["events"], hash_name=setup["hash"])
    # Until every block that is given out was somebody's before, and is evicted for it, as in a server that runs.
    run(
        side, seed=-1, num_requests=2 + setup["pool_blocks"] // num_blocks, num_blocks=num_blocks, block_size=block_size
    )
    gc.collect()
    gc.freeze()  # what was imported is not looked through again
    print(MARK + json.dumps({"python": sys.version.split()[0]}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        times = run(side, **job, num_blocks=num_blocks, block_size=block_size)
        print(MARK + json.dumps(times), flush=True)


if __name__ == "__main__":
    main()

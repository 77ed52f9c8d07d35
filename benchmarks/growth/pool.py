"""The same requests on pools of very different sizes: what the pool's bookkeeping costs must not depend on them."""

import gc
import statistics
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from benchmarks.growth.stepper import Stepper
from benchmarks.growth.verdict import Finding, Verdict, constant
from benchmarks.paging.report import Column, Table
from engine.config import EngineConfig
from engine.hash_executor import HashExecutor
from engine.kvcache.block_hash import BlockHash
from engine.kvcache.block_pool import BlockPool
from worker.heap import settle_heap

BLOCK_SIZE = 16
VOCABULARY = 32_000
PROMPT_BLOCKS = 32
DECODING = 16  # requests that decode together
# A pool of a million blocks does not lie in the CPU's caches, one of a thousand does: the same work finds more of it
# in memory.
CONSTANT = 1.5

EMPTY, FULL = "none", "all"  # of the blocks
_COLLECTION = "gc, ms"
_MEASURES = ("request, µs", "hit, µs", "step, µs")


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """What is run.

    Raises:
        ValueError: there is nothing to measure, or the smallest pool has no room for it.
    """

    num_blocks: Sequence[int]  # rising; each with room for the requests that decode together
    num_requests: int = 200  # of each kind, and decode steps

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ValueError(f"a pool serves at least one request, not {self.num_requests}")
        if self.num_blocks[0] < (needed := _decoding_blocks(self.num_requests)):
            raise ValueError(
                f"a pool has at least {needed} blocks, not {self.num_blocks[0]}, "
                f"for {DECODING} requests that decode {self.num_requests} tokens"
            )


@dataclass(frozen=True, slots=True)
class _Costs:
    """Medians, in seconds, of what is not the executor's."""

    request: float  # `PROMPT_BLOCKS` blocks allocated, registered, and given back
    hit: float  # the same prompt again
    decode_step: float


def pool_finding(config: PoolConfig) -> Finding:
    """A row for each size and state."""
    table = Table(
        "pool",
        f"The same work on larger pools, without the executor (prompts of {PROMPT_BLOCKS} blocks, {DECODING} a step)",
        [
            Column("blocks", ","),
            Column("cached"),
            *(Column(name, ",.0f") for name in _MEASURES),
            Column("made in, s", ",.2f"),
            Column("bytes a block", ",.0f"),
            Column(_COLLECTION, ",.1f"),
        ],
    )
    _Work(_stepper(config.num_blocks[0]), config.num_requests).costs(clears=True)  # warms up
    for num_blocks in config.num_blocks:
        stepper = _stepper(num_blocks)
        settle_heap()
        work = _Work(stepper, config.num_requests)
        for state in (EMPTY, FULL):
            if state == FULL:
                work.fill()
            costs, collection_s = work.costs(clears=state == EMPTY), _collection_s()
            table.add(
                num_blocks, state, 1e6 * costs.request, 1e6 * costs.hit, 1e6 * costs.decode_step,
                stepper.construction_s if state == EMPTY else None,
                bookkeeping_bytes(num_blocks, cached=state == FULL),
                1e3 * collection_s,
            )  # fmt: skip
        stepper.close()
        del work, stepper
        gc.unfreeze()
    table.notes.append("gc: one garbage collection of all generations, which a process does now and then by itself")
    return Finding(table, list(_verdicts(table)))


def _verdicts(table: Table) -> Iterator[Verdict]:
    columns = [column.name for column in table.columns]
    for state in (EMPTY, FULL):
        rows = [dict(zip(columns, row, strict=True)) for row in table.rows if state in row]
        for name in (*_MEASURES, "bytes a block", _COLLECTION):
            ends = [float(str(rows[end][name])) for end in (0, -1)]
            if name == _COLLECTION:
                ends = [max(milliseconds, 1.0) for milliseconds in ends]  # as good as none
            yield constant(f"{name.partition(',')[0]}, {state} cached", ends, CONSTANT)


def _decoding_blocks(num_steps: int) -> int:
    """Of all requests that decode together, each from half a prompt on."""
    return DECODING * (PROMPT_BLOCKS // 2 + num_steps // BLOCK_SIZE + 2)


def _stepper(num_blocks: int) -> Stepper:
    return Stepper(
        HashExecutor(vocab_size=VOCABULARY, block_size=BLOCK_SIZE),
        EngineConfig(
            num_blocks=num_blocks + 1,
            max_model_len=PROMPT_BLOCKS * BLOCK_SIZE * 4,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=DECODING * PROMPT_BLOCKS * BLOCK_SIZE,
            expected_growth_tokens=0,
        ),
    )


class _Work:
    """Requests of prompts that nobody has had before."""

    def __init__(self, stepper: Stepper, num_requests: int) -> None:
        self._stepper = stepper
        self._num_requests = num_requests
        self._serial = count()

    def fill(self) -> None:
        """Until every block is cached: each holds something that nobody asks for again."""
        while free := self._stepper.engine.stats().num_free_blocks:
            self._stepper.whole(self._prompt(min(free, 2 * PROMPT_BLOCKS)))
        self._stepper.step()  # events are taken, as a worker takes them

    def costs(self, *, clears: bool) -> _Costs:
        """`clears`: blocks that are given out have never been cached."""
        requests, hits = [], []
        for _ in range(self._num_requests):
            self._make_room(PROMPT_BLOCKS, clears)
            prompt = self._prompt(PROMPT_BLOCKS)
            requests.append(self._stepper.whole(prompt).rest)
            hits.append(self._stepper.whole(prompt).rest)
        self._make_room(_decoding_blocks(self._num_requests), clears)
        prompts = [self._prompt(PROMPT_BLOCKS // 2) for _ in range(DECODING)]
        steps = [took.rest for took in self._stepper.decode(prompts, self._num_requests)]
        return _Costs(*map(statistics.median, (requests, hits, steps)))

    def _make_room(self, num_blocks: int, clears: bool) -> None:
        if clears and self._stepper.engine.stats().num_free_blocks < num_blocks:
            self._stepper.engine.clear_cache()
            self._stepper.step()

    def _prompt(self, num_blocks: int) -> list[int]:
        serial = next(self._serial)
        first = [serial % VOCABULARY, serial // VOCABULARY]
        return first + [7] * (num_blocks * BLOCK_SIZE - len(first))


def bookkeeping_bytes(num_blocks: int, *, cached: bool) -> float:
    """Python's memory for a block of a pool; with `cached`, for one whose content is registered."""
    hashes = [BlockHash(number.to_bytes(16, "big")) for number in range(num_blocks)] if cached else []
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    pool = BlockPool(num_blocks + 1)
    if cached:
        for start in range(0, num_blocks, PROMPT_BLOCKS):
            block_ids = pool.allocate(min(PROMPT_BLOCKS, num_blocks - start))
            assert block_ids is not None
            parent = None
            for offset, block_id in enumerate(block_ids):
                pool.register(block_id, hashes[start + offset], parent)
                parent = block_id
            pool.free(block_ids)
            pool.take_events()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The hashes are the pool's, too; they were made before, so that nothing but blocks was counted.
    return (after - before) / num_blocks + (sys.getsizeof(hashes[0]) if cached else 0)


def _collection_s() -> float:
    gc.collect()  # what there is to collect by now
    began = time.perf_counter()
    gc.collect()
    return time.perf_counter() - began

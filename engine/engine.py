"""One worker's engine: `schedule → execute → update`, and what peers hold of its pool.

Single-threaded: one thread owns it and calls everything. Requests come by `add_request`; `step` advances all of them
and says everything that happened; in between, peers' blocks are received (`commit_blocks`, `finish_receiving`) and held
for peers (`pin_cached`, `unpin`).
"""

from collections.abc import Mapping, Sequence

from engine.config import EngineConfig
from engine.executor import Executor
from engine.kvcache.block_hash import BlockHash
from engine.kvcache.manager import KVCacheManager
from engine.kvcache.spec import FullAttentionSpec
from engine.memory import PoolMemory
from engine.outputs import FilledBlocks, RequestOutput, StepResult
from engine.receiving import Receiving
from engine.request import Request
from engine.sampling_params import FinishReason
from engine.scheduler import Scheduler
from engine.stats import EngineStats


class Engine:
    """Runs requests on an executor, in blocks of `memory`.

    Raises:
        ValueError: executor and configuration differ in block size, or the memory is too small for the pool.
    """

    def __init__(self, config: EngineConfig, executor: Executor, memory: PoolMemory) -> None:
        layout = executor.layout
        if layout.block_size != config.block_size:
            raise ValueError(f"block_size is {config.block_size}, but the executor's is {layout.block_size}")
        needed = config.num_blocks * layout.bytes_per_block
        if memory.nbytes < needed:
            raise ValueError(
                f"{config.num_blocks} blocks of {layout.bytes_per_block} bytes need {needed} bytes, "
                f"the memory has {memory.nbytes}"
            )
        executor.bind(memory, config.num_blocks)
        self.fence: int | None = None  # of the last step: whoever reads the pool on another stream waits for it
        self.config = config
        self.executor = executor
        self._manager = KVCacheManager(config.num_blocks, [FullAttentionSpec(config.block_size)])
        self._pool = self._manager.pool
        self._scheduler = Scheduler(
            config, self._manager, fingerprint=layout.fingerprint, vocab_size=executor.vocab_size
        )
        self._requests = self._scheduler.requests
        self._receiving = Receiving(self._requests, self._manager)

    # --- requests

    def add_request(self, request: Request, forks: Sequence[Request] = ()) -> None:
        """Queues the request.

        Args:
            forks: then the request is the prompt of these, has no output and ends when they begin, see `forking`. They
                are as the prompt in all but their names, seeds and matchers, and none of them `receives_kv`.

        Raises:
            ValueError: it is no good, too long, or could never fit; the message has the numbers.
            QueueFull: too many wait already.
        """
        self._scheduler.add_request(request, forks)

    def abort(self, request_id: str) -> bool:
        """Ends the request and frees its blocks, whatever its state; False if it has ended already.

        With a prompt the forks end that still wait for it. A prompt without forks is computed all the same.
        Of a receiving request the caller guarantees that no copy into its blocks is in flight.
        """
        return self._scheduler.abort(request_id)

    def step(self, now: float) -> StepResult:
        """Decides, computes and takes in one step; does next to nothing if there is nothing to do."""
        schedule = self._scheduler.schedule(now)
        outputs: list[RequestOutput] = []
        filled: list[FilledBlocks] = []
        if schedule.step.requests:
            computed = self.executor.execute(schedule.step)
            self.fence = computed.fence
            outputs, filled = self._scheduler.update(schedule.step, computed)
        return StepResult(
            started_at=now,
            outputs=tuple(outputs),
            filled=tuple(filled),
            fence=self.fence,
            received_targets=schedule.received_targets,
            kv_events=self._pool.take_events(),
            preempted=schedule.preempted,
            admitted=schedule.admitted,
            num_computed_tokens=schedule.step.num_tokens,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` could do something now; if not, only a call of another method can change that."""
        return self._requests.has_work or self._pool.has_events

    # --- receiving

    def commit_blocks(self, request_id: str, num_blocks: int) -> None:
        """The leading `num_blocks` blocks of a receiving request are real now: full ones enter the prefix cache."""
        self._receiving.commit_blocks(request_id, num_blocks)

    def finish_receiving(
        self,
        request_id: str,
        num_tokens: int,
        first_token: int | None,
        fork_tokens: Mapping[str, int] | None = None,
    ) -> FinishReason | None:
        """The KV of `num_tokens` leading tokens is real: the request runs from now on, and what is
        missing is computed here.

        Args:
            first_token: the next token after all that the request has, sampled by the peer and delivered already; it
                is not reported again. None: it is sampled here, so at least the last token is computed here.
            fork_tokens: of a prompt, instead: likewise of each of its forks, by id; who is none any more is ignored.
                None: they are sampled here.

        Returns why the request ended, if it did with `first_token`. A fork that ends with its token is not reported.

        Raises:
            ValueError: no such request receives, or the numbers contradict its tokens.
        """
        return self._receiving.finish(request_id, num_tokens, first_token, fork_tokens)

    # --- holding

    def pin_cached(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """Holds the longest leading run of these blocks that is cached, one pin a block; their ids."""
        (block_ids,) = self._manager.get_computed_blocks(block_hashes).block_tables
        self._manager.pin(block_ids)
        return list(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Gives back pins, in any order.

        Raises:
            ValueError: a block that is not pinned so often; nothing is changed.
        """
        self._manager.unpin(block_ids)
        self._requests.wake()

    def cached_hashes(self) -> list[BlockHash]:
        """Of all blocks that a request could find now; what all KV events so far add up to, untaken ones included."""
        return self._pool.cached_hashes()

    def clear_cache(self) -> None:
        """Forgets all cached blocks that nobody holds."""
        self._pool.clear()
        self._requests.wake()

    # --- observing

    def stats(self) -> EngineStats:
        requests, counters = self._requests, self._scheduler.counters
        return EngineStats(
            num_running=len(requests.running),
            num_waiting=requests.num_waiting,
            num_receiving=len(requests.receiving),
            num_free_blocks=self._pool.num_free_blocks,
            num_cached_blocks=self._pool.num_cached_blocks,
            num_active_blocks=self._pool.num_active_blocks,
            num_pins=self._manager.num_pins,
            num_waiting_tokens=requests.waiting.num_tokens
            + sum(request.num_uncomputed_tokens for request in requests.running),
            num_prefix_queries=counters.num_prefix_queries,
            num_prefix_hits=counters.num_prefix_hits,
            num_preemptions=counters.num_preemptions,
            num_computed_tokens=counters.num_computed_tokens,
            num_sampled_tokens=counters.num_sampled_tokens,
        )

    def check_integrity(self) -> None:
        """Proves pool, block tables and pins whole, and the requests where their states say.

        Raises:
            AssertionError: they are not; the message has the numbers.
        """
        self._manager.check_integrity()
        self._requests.check_integrity()

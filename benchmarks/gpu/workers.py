"""An engine as a holder, and one as a consumer: a worker's two roles, without threads and servers around them."""

import asyncio
import time
from collections.abc import Sequence

from engine.engine import Engine
from engine.kvcache.block_hash import BlockHash
from engine.request import Request
from engine.sampling_params import SamplingParams
from kvtransfer.events import CachedPinned, Computed, Filled, HandoffResult, HolderLost
from kvtransfer.messages import CachedSource, Complete, Open, PrefillSource
from kvtransfer.ports import HolderListener
from kvtransfer.puller import Puller


class _Stepper:
    """Steps an engine on the event loop for as long as there is work."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self.engine.has_work:
            self.step()
            await asyncio.sleep(0)  # messages are heard between two steps

    def step(self) -> None:
        raise NotImplementedError


class HolderEngine(_Stepper):
    """Prefills for a peer. Implements `kvtransfer.ports.HolderPort`."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._listeners: dict[str, tuple[HolderListener, int]] = {}

    def start_prefill(self, open: Open, listener: HolderListener) -> None:
        source = open.source
        assert isinstance(source, PrefillSource)
        self._listeners[open.handoff_id] = (listener, len(source.token_ids))
        self.engine.add_request(
            Request(open.handoff_id, source.token_ids, source.params, arrival_time=time.monotonic(), prefill_only=True)
        )
        self.wake()

    def pin_cached(self, open: Open, listener: HolderListener) -> None:
        assert isinstance(open.source, CachedSource)
        held = self.engine.pin_cached([BlockHash(block_hash) for block_hash in open.source.block_hashes])
        listener(CachedPinned((tuple(held),), self.engine.fence))

    def abort(self, handoff_id: str) -> None:
        self.engine.abort(handoff_id)

    def unpin(self, block_ids: Sequence[int]) -> None:
        self.engine.unpin(block_ids)

    def step(self) -> None:
        result = self.engine.step(time.monotonic())
        for filled in result.filled:
            listener, _ = self._listeners[filled.request_id]
            listener(Filled(filled.first, filled.block_ids, filled.num_tokens, filled.group, result.fence))
        for output in result.outputs:
            listener, num_tokens = self._listeners.pop(output.request_id)
            listener(Computed((output.token,), num_tokens, output.num_cached_tokens))


class ConsumerEngine(_Stepper):
    """Has prompts prefilled by a peer, and decodes. Implements `kvtransfer.ports.ConsumerPort`."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.puller: Puller | None = None  # set once it is made, around this port
        self.outputs: dict[str, list[int]] = {}
        self.copied_blocks = 0
        self.staged = False  # whether to ask for copies in host memory
        self._requests: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
        self._done: dict[str, asyncio.Future[None]] = {}

    async def generate(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """The request's whole output.

        Raises:
            RuntimeError: the hand-off was lost.
        """
        self._requests[request_id] = (tuple(prompt), params)
        self._done[request_id] = asyncio.get_running_loop().create_future()
        self.outputs[request_id] = []
        self.engine.add_request(Request(request_id, prompt, params, arrival_time=time.monotonic(), receives_kv=True))
        self.wake()
        await self._done[request_id]
        return self.outputs[request_id]

    def step(self) -> None:
        result = self.engine.step(time.monotonic())
        for target in result.received_targets:
            prompt, params = self._requests[target.request_id]
            source = PrefillSource(prompt, len(prompt), params, skip_blocks=target.num_cached_blocks)
            layout = self.engine.executor.layout
            open = Open(
                f"handoff-{target.request_id}",
                target.request_id,
                "consumer",
                layout.fingerprint,
                60.0,
                source,
                self.staged,
            )
            assert self.puller is not None
            self.puller.pull("holder", open, target.block_tables)
        for output in result.outputs:
            self.outputs[output.request_id].append(output.token.token_id)
            if output.finish_reason is not None:
                self._done[output.request_id].set_result(None)

    def first_tokens(self, request_id: str, complete: Complete) -> None:
        self.outputs[request_id].extend(token.token_id for token in complete.first_tokens)

    def commit_blocks(self, request_id: str, num_blocks: int) -> None:
        self.engine.commit_blocks(request_id, num_blocks)

    def committed(self, request_id: str, result: HandoffResult) -> None:
        prompt, _ = self._requests[request_id]
        self.copied_blocks += result.stats.bytes // self.engine.executor.layout.bytes_per_block
        ended = self.engine.finish_receiving(request_id, len(prompt), self.outputs[request_id][0])
        if ended is not None:
            self._done[request_id].set_result(None)
        self.wake()

    def holder_lost(self, request_id: str, lost: HolderLost) -> None:
        self.engine.abort(request_id)
        self._done[request_id].set_exception(RuntimeError(f"the holder was lost: {lost.message}"))

    def ended(self, request_id: str) -> None:
        self.engine.abort(request_id)

"""What tests of hand-offs share: requests to open, and workers' engines reduced to what a hand-off sees of them."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from engine.executor import SampledToken
from engine.memory import KVLayout
from engine.sampling_params import SamplingParams
from kvtransfer.errors import HandoffRefused
from kvtransfer.events import CachedPinned, Computed, Filled, HandoffResult, HolderLost, WorkerEvent
from kvtransfer.handle import PoolHandle
from kvtransfer.messages import CachedSource, Complete, Open, PrefillSource, Source
from kvtransfer.ports import HolderListener
from kvtransfer.sampling_wire import prompt_logprobs_to_wire
from tandem.v1.sampling_pb2 import PromptLogprobs

BLOCK_SIZE = 4
FINGERPRINT = b"0123456789abcdef"
LAYOUT = KVLayout(block_size=BLOCK_SIZE, bytes_per_block=64, fingerprint=FINGERPRINT)
TOKEN = SampledToken(42, -0.5, ((42, -0.5), (7, -1.5)))
PARAMS = SamplingParams(max_tokens=16)


def pool_handle(num_blocks: int = 100, instance_id: str = "holder-1") -> PoolHandle:
    return PoolHandle(
        instance_id, "loopback", b"?", 0, num_blocks * LAYOUT.bytes_per_block, LAYOUT.bytes_per_block, FINGERPRINT
    )


def prefill(
    num_tokens: int = 10, skip_blocks: int = 0, num_choices: int = 1, prompt_logprobs: int | None = None
) -> PrefillSource:
    seeds = tuple(range(num_choices)) if num_choices > 1 else ()
    params = replace(PARAMS, prompt_logprobs=prompt_logprobs)
    return PrefillSource(tuple(range(num_tokens)), num_tokens, params, skip_blocks, seeds=seeds)


def computed(source: Source) -> Computed:
    """How any holder's prefill ends: another token for each choice, and what was asked for of the prompt."""
    assert isinstance(source, PrefillSource)
    tokens = (TOKEN, *(SampledToken(TOKEN.token_id + seed) for seed in source.seeds[1:]))
    num_top = source.params.prompt_logprobs
    logprobs = None
    if num_top is not None:
        top = tuple((rank, -0.5 - rank) for rank in range(num_top))
        prompt = source.token_ids[: source.num_prompt_tokens]
        logprobs = prompt_logprobs_to_wire([SampledToken(token_id, -0.25, top) for token_id in prompt[1:]], num_top)
    return Computed(tokens, len(source.token_ids), prompt_logprobs=logprobs)


def cached(num_blocks: int = 3, skip_blocks: int = 0) -> CachedSource:
    return CachedSource(tuple(bytes([i]) * 16 for i in range(num_blocks)), skip_blocks)


def an_open(
    source: Source | None = None,
    *,
    handoff_id: str = "handoff-1",
    request_id: str = "request-1",
    fingerprint: bytes = FINGERPRINT,
    timeout_s: float = 100.0,
) -> Open:
    return Open(handoff_id, request_id, "consumer-1", fingerprint, timeout_s, source or prefill())


class FakeHolderEngine:
    """A `HolderPort` whose test says when blocks are filled; it counts pins."""

    def __init__(self) -> None:
        self.listeners: dict[str, HolderListener] = {}
        self.opened: dict[str, Open] = {}
        self.aborted: list[str] = []
        self.pins: Counter[int] = Counter()
        self.cached_blocks: tuple[int, ...] = ()
        self.refusal: HandoffRefused | None = None
        self.asked = asyncio.Event()

    def start_prefill(self, open: Open, listener: HolderListener) -> None:
        if self.refusal is not None:
            raise self.refusal
        self._remember(open, listener)

    def pin_cached(self, open: Open, listener: HolderListener) -> None:
        assert isinstance(open.source, CachedSource)
        self._remember(open, listener)
        held = self.cached_blocks[: len(open.source.block_hashes)]
        self.pins.update(held)
        listener(CachedPinned((held,)))

    def abort(self, handoff_id: str) -> None:
        self.aborted.append(handoff_id)

    def unpin(self, block_ids: Sequence[int]) -> None:
        self.pins.subtract(block_ids)
        assert min(self.pins.values(), default=0) >= 0, self.pins

    @property
    def num_pins(self) -> int:
        return self.pins.total()

    def fill(self, handoff_id: str, first: int, block_ids: Sequence[int], num_tokens: int) -> None:
        self.pins.update(block_ids)
        self.say(handoff_id, Filled(first, tuple(block_ids), num_tokens))

    def compute(self, handoff_id: str, num_tokens: int) -> None:
        self.say(
            handoff_id,
            replace(
                computed(self.opened[handoff_id].source),
                num_tokens=num_tokens,
                num_cached_tokens=BLOCK_SIZE,
                queued_s=0.25,
                prefill_s=0.5,
            ),
        )

    def say(self, handoff_id: str, event: WorkerEvent) -> None:
        self.listeners[handoff_id](event)

    def _remember(self, open: Open, listener: HolderListener) -> None:
        self.listeners[open.handoff_id] = listener
        self.opened[open.handoff_id] = open
        self.asked.set()


class FakeConsumerEngine:
    """A `ConsumerPort` that remembers what it heard."""

    def __init__(self) -> None:
        self.sampled: list[SampledToken] = []  # first tokens that were delivered
        self.prompt_logprobs: PromptLogprobs | None = None
        self.num_committed_blocks = 0
        self.result: HandoffResult | None = None
        self.lost: HolderLost | None = None
        self.num_ended = 0
        self.over = asyncio.Event()
        self.changed = asyncio.Event()

    def first_tokens(self, request_id: str, complete: Complete) -> None:
        self.sampled.extend(complete.first_tokens)
        self.prompt_logprobs = complete.prompt_logprobs
        self.changed.set()
        self.on_first_tokens()

    def on_first_tokens(self) -> None:
        """For tests that do something at once."""

    def commit_blocks(self, request_id: str, num_blocks: int) -> None:
        assert num_blocks > self.num_committed_blocks
        self.num_committed_blocks = num_blocks
        self.changed.set()

    def committed(self, request_id: str, result: HandoffResult) -> None:
        self.result = result
        self._end()

    def holder_lost(self, request_id: str, lost: HolderLost) -> None:
        self.lost = lost
        self._end()

    def ended(self, request_id: str) -> None:
        self.num_ended += 1
        self._end()

    def _end(self) -> None:
        assert not self.over.is_set(), "a hand-off ends once"
        self.over.set()
        self.changed.set()

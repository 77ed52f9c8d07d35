"""Several choices of one prompt on real workers: what a gateway sees of them, and what holds the workers up."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import pytest

from decode_workers import all_given_back, expected
from engine.executor import ModelOutput, SampledToken, SchedulerOutput
from engine.sampling_params import SamplingParams
from gateway_end import PATIENCE_S, GatewayEnd, Seen
from kvtransfer.sampling_wire import prompt_logprobs_from_wire
from worker.node import WorkerNode

SAMPLED = SamplingParams(max_tokens=12)
Peer = tuple[str, str]
Workers = dict[str, WorkerNode]


class Choices:
    """A prompt's choices as a gateway sees them: `name.0`, `name.1`, …"""

    def __init__(self, gateway: GatewayEnd, name: str, prompt: list[int], params: SamplingParams, num: int) -> None:
        self.gateway = gateway
        self.name = name
        self.prompt = prompt
        self.params = params
        self.seeds = {f"{name}.{i}": 1000 + 7 * i for i in range(num)}

    async def submit(self, prefill: Peer | None, timeout_ms: int = 0) -> "Choices":
        await self.gateway.submit(
            self.name, self.prompt, self.params, prefill=prefill, choices=self.seeds, timeout_ms=timeout_ms
        )
        return self

    @property
    def seen(self) -> dict[str, Seen]:
        return {name: self.gateway.seen[name] for name in self.seeds}

    @property
    def of_prompt(self) -> Seen:
        return self.gateway.seen[self.name]

    def expected(self, name: str) -> list[int]:
        return expected(self.prompt, replace(self.params, seed=self.seeds[name]))

    async def have(self, num_tokens: int, but: Sequence[str] = ()) -> None:
        await self.gateway.until(
            lambda: all(len(seen.token_ids) >= num_tokens for name, seen in self.seen.items() if name not in but)
        )

    async def over(self, but: Sequence[str] = ()) -> None:
        """All have ended, with the tokens that they should have; but for those that were aborted."""
        rest = {name: seen for name, seen in self.seen.items() if name not in but}
        await self.gateway.until(lambda: all(seen.is_over for seen in rest.values()) or self.of_prompt.is_over)
        assert self.of_prompt.refused is None
        for name, seen in rest.items():
            assert seen.token_ids == self.expected(name), name
            assert seen.usage is not None
            assert seen.stages is not None
        assert self.of_prompt == Seen(need_prefill=self.of_prompt.need_prefill), "a prompt has no output"

    def prompt_logprobs(self) -> tuple[SampledToken, ...]:
        """They come with one choice alone."""
        (wire,) = [seen.prompt_logprobs for seen in self.seen.values() if seen.prompt_logprobs is not None]
        return prompt_logprobs_from_wire(wire, self.prompt)


class Gate:
    """Holds a worker's engine before its steps, or a consumer's copies before they are done."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.waiting: asyncio.Event = asyncio.Event()  # somebody is held


@contextmanager
def held_steps(worker: WorkerNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, loop = Gate(), asyncio.get_running_loop()
    executor = worker._role._context.built.engine.executor
    execute = executor.execute

    def execute_when_open(step: SchedulerOutput) -> ModelOutput:
        loop.call_soon_threadsafe(gate.waiting.set)
        assert gate.open.wait(PATIENCE_S)
        return execute(step)

    monkeypatch.setattr(executor, "execute", execute_when_open)
    try:
        yield gate
    finally:
        gate.open.set()


class HeldCopies:
    """A decode worker's copies of peers' blocks, none of which begins before `release`."""

    def __init__(self, worker: WorkerNode, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copier = worker._role.puller.copier
        self._copy = self._copier.copy
        self._held: list[tuple[object, ...]] = []
        self._are_held = True
        monkeypatch.setattr(self._copier, "copy", self._hold)

    def _hold(self, *copy: object) -> None:
        if self._are_held:
            self._held.append(copy)
        else:
            self._copy(*copy)

    def release(self) -> None:
        self._are_held = False
        held, self._held = self._held, []
        for copy in held:
            self._copy(*copy)


@asynccontextmanager
async def gateways(*peers: Peer) -> AsyncIterator[list[GatewayEnd]]:
    """One of each worker; at the end no worker holds anything for anybody."""
    ends = [GatewayEnd(address) for _, address in peers]
    for end in ends:
        await end.__aenter__()
    try:
        yield ends
        for end in ends:
            if end.ended is None:
                await all_given_back(end)
    finally:
        for end in ends:
            await end.__aexit__()


def num_computed(worker: WorkerNode) -> int:
    return worker._stats.num_computed_tokens

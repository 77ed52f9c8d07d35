"""Several choices of one prompt on real workers, real but for the model: computed once, ended each by itself."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import pytest
from grpc import StatusCode

from decode_worker import DecodeWorker
from decode_workers import VOCAB_SIZE, Start, all_given_back, expected, greedy, prompt_of
from engine.config import EngineConfig
from engine.executor import ModelOutput, SampledToken, SchedulerOutput
from engine.hash_executor import expected_prompt_logprobs, expected_tokens
from engine.sampling_params import SamplingParams
from gateway_end import PATIENCE_S, GatewayEnd, Seen
from kvtransfer.sampling_wire import prompt_logprobs_from_wire
from prefill_worker import PrefillWorker
from tandem.v1 import sampling_pb2
from tandem.v1 import worker_pb2 as pb
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


# --- computed once


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 160])
@pytest.mark.parametrize("num_choices", [2, 3, 5, 8])
async def test_choices_are_the_same_apart_local_and_warm_and_their_prompt_is_computed_once(
    start: Start, workers: Workers, num_choices: int, length: int
) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    prompt = prompt_of(length)
    cacheable = (length - 1) // 16 * 16
    decoded = num_choices * (SAMPLED.max_tokens - 1)  # the last token's KV is never computed
    async with gateways(decode, prefill) as (gateway, _):
        for turn, (plan, computed_at) in enumerate([(prefill, "p0"), (prefill, "p0"), (None, "d0")]):
            before = {name: num_computed(worker) for name, worker in workers.items()}
            choices = await Choices(gateway, f"r{turn}", prompt, SAMPLED, num_choices).submit(plan)
            await choices.over()
            cached = cacheable if turn else 0
            for seen in choices.seen.values():
                assert seen.usage is not None
                assert seen.usage.num_cached_tokens == cached
                assert seen.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
            await all_given_back(gateway)
            computed = {name: num_computed(worker) - before[name] for name, worker in workers.items()}
            assert computed == {"p0": 0, "d0": decoded, computed_at: length - cached + decoded * (computed_at == "d0")}


def watch_blocks(worker: WorkerNode, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks that are held in each step, from now on."""
    held: list[int] = []
    engine = worker._role._context.built.engine
    execute = engine.executor.execute

    def execute_and_count(step: SchedulerOutput) -> ModelOutput:
        held.append(engine.stats().num_active_blocks)
        return execute(step)

    monkeypatch.setattr(engine.executor, "execute", execute_and_count)
    return held


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "local"])
async def test_four_choices_of_a_thousand_tokens_hold_the_prompts_blocks_once(
    start: Start, workers: Workers, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    large = EngineConfig(num_blocks=128, max_model_len=1024, max_num_batched_tokens=256)
    prefill, decode = await start(PrefillWorker, "p0", engine=large), await start(DecodeWorker, "d0", engine=large)
    held = watch_blocks(workers["d0"], monkeypatch)
    async with gateways(decode, prefill) as (gateway, _):
        choices = await Choices(gateway, "r", prompt_of(1000), replace(SAMPLED, max_tokens=8), 4).submit(
            prefill if apart else None
        )
        await gateway.until(lambda: all(seen.is_over for seen in choices.seen.values()))
        for name, seed in choices.seeds.items():
            params = replace(SAMPLED, max_tokens=8, seed=seed)
            assert choices.seen[name].token_ids == expected_tokens(choices.prompt, params, VOCAB_SIZE)
    # 62 that the prompt fills, and each choice's own copy of the one that it fills in part.
    assert max(held) == 62 + 4


async def test_greedy_choices_are_all_the_same(start: Start) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    async with gateways(decode, prefill) as (gateway, _):
        for turn, plan in enumerate([prefill, None]):
            choices = await Choices(gateway, f"r{turn}", prompt_of(70), greedy(), 4).submit(plan)
            await choices.over()
            assert len({tuple(seen.token_ids) for seen in choices.seen.values()}) == 1


async def test_many_prompts_of_many_choices_are_right_with_a_tiny_pool(start: Start) -> None:
    tiny = EngineConfig(num_blocks=9, max_model_len=128, max_num_batched_tokens=32, max_num_seqs=4)
    prefill = await start(PrefillWorker, "p0", engine=tiny)
    decode = await start(DecodeWorker, "d0", engine=tiny)
    async with gateways(decode, prefill) as (gateway, _):
        prompts = []
        for i in range(12):
            prompt, params = prompt_of(5 + 6 * i, seed=i), replace(SAMPLED, max_tokens=2 + i)
            choices = Choices(gateway, f"r{i}", prompt, params, 2 + i % 4)
            prompts.append(await choices.submit(prefill if i % 3 else None))
        for choices in prompts:
            await choices.over()


async def test_choices_that_end_with_their_first_token_do_not_end_the_others(start: Start) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    prompt = prompt_of(100)
    async with gateways(decode, prefill) as (gateway, _):
        for turn, plan in enumerate([prefill, None]):
            firsts = [expected(prompt, replace(SAMPLED, seed=1000 + 7 * i))[0] for i in range(4)]
            params = replace(SAMPLED, stop_token_ids=(firsts[0], firsts[2]))
            choices = await Choices(gateway, f"some{turn}", prompt, params, 4).submit(plan)
            await choices.over()
            ended = [seen for seen in choices.seen.values() if len(seen.token_ids) == 1]
            assert len(ended) >= 2
            assert all(seen.finish_reason == sampling_pb2.FINISH_REASON_STOP for seen in ended)
            assert all(seen.matched_token_id == seen.token_ids[0] for seen in ended)
            everyone = await Choices(gateway, f"all{turn}", prompt, replace(SAMPLED, max_tokens=1), 4).submit(plan)
            await everyone.over()


# --- log-probabilities of the prompt


@pytest.mark.parametrize("num_choices", [1, 4])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 150])
async def test_a_prompts_log_probabilities_are_the_same_apart_local_and_warm(
    start: Start, workers: Workers, length: int, num_choices: int
) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    other = await start(DecodeWorker, "d1")
    prompt, params = prompt_of(length), replace(SAMPLED, prompt_logprobs=3)
    async with gateways(decode, prefill, other) as (gateway, _, elsewhere):
        warm = await elsewhere.submit("warm", prompt, greedy())
        await elsewhere.until(lambda: warm.is_over)
        for turn, plan in enumerate([prefill, prefill, None, None, prefill]):
            # What a third worker caches helps nobody: it is not asked.
            cached_on = (*other, length // 16)
            if num_choices == 1:
                alone = await gateway.submit(f"r{turn}", prompt, params, prefill=plan, cached_on=cached_on)
                await gateway.until(lambda alone=alone: alone.is_over)
                assert alone.token_ids == expected(prompt, params)
                assert alone.prompt_logprobs is not None
                logprobs = prompt_logprobs_from_wire(alone.prompt_logprobs, prompt)
            else:
                choices = await Choices(gateway, f"r{turn}", prompt, params, num_choices).submit(plan)
                await choices.over()
                logprobs = choices.prompt_logprobs()
            assert logprobs == expected_prompt_logprobs(prompt, params, VOCAB_SIZE)
        assert workers["p0"]._role.puller.counters.opened == 0
        without = await gateway.submit("without", prompt, SAMPLED, prefill=prefill)
        await gateway.until(lambda: without.is_over)
        assert without.prompt_logprobs is None


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_they_are_the_same_when_the_prefill_worker_was_lost(start: Start, num_choices: int) -> None:
    decode, spare = await start(DecodeWorker, "d0"), await start(PrefillWorker, "p1")
    gone = ("p0", "127.0.0.1:9")  # nobody listens at the discard port
    prompt, params = prompt_of(100), replace(SAMPLED, prompt_logprobs=2)
    async with gateways(decode, spare) as (gateway, _):
        for name, replacement in (("another", spare), ("none", None)):
            if num_choices == 1:
                seen = asks = await gateway.submit(name, prompt, params, prefill=gone)
            else:
                choices = await Choices(gateway, name, prompt, params, num_choices).submit(gone)
                seen, asks = choices.seen[f"{name}.2"], choices.seen[f"{name}.0"]
            await gateway.until(lambda asks=asks: bool(asks.need_prefill))
            await gateway.assign(asks.need_prefill[0].request_id, replacement)
            await gateway.until(lambda seen=seen: seen.is_over)
            if num_choices == 1:
                assert seen.token_ids == expected(prompt, params)
                assert seen.prompt_logprobs is not None
                logprobs = prompt_logprobs_from_wire(seen.prompt_logprobs, prompt)
            else:
                await choices.over()
                logprobs = choices.prompt_logprobs()
            assert logprobs == expected_prompt_logprobs(prompt, params, VOCAB_SIZE)


# --- a prefill worker is lost


async def test_the_first_choice_that_lives_asks_for_another_prefill_worker(start: Start) -> None:
    decode, spare = await start(DecodeWorker, "d0"), await start(PrefillWorker, "p1")
    gone = ("p0", "127.0.0.1:9")
    async with gateways(decode, spare) as (gateway, _):
        for name, replacement in (("another", spare), ("none", None)):
            choices = await Choices(gateway, name, prompt_of(100), SAMPLED, 4).submit(gone)
            first, second, third, fourth = choices.seen
            await gateway.until(lambda c=choices, n=first: bool(c.seen[n].need_prefill))
            await gateway.abort(third)  # did not ask: nothing is asked again
            await gateway.abort(first)
            await gateway.until(lambda c=choices, n=second: bool(c.seen[n].need_prefill))
            assert choices.seen[second].need_prefill[0].failed_worker_id == "p0"
            assert not choices.seen[third].need_prefill
            await gateway.assign(fourth, replacement)
            await choices.over(but=(first, third))
            assert [len(seen.need_prefill) for seen in choices.seen.values()] == [1, 1, 0, 0]


async def test_choices_whose_prefill_workers_are_all_lost_fail_together_naming_the_leg(start: Start) -> None:
    decode = await start(DecodeWorker, "d0", max_repairs=1)
    gone = ("p0", "127.0.0.1:9")
    async with gateways(decode) as (gateway,):
        choices = await Choices(gateway, "r", prompt_of(100), SAMPLED, 3).submit(gone)
        await gateway.until(lambda: bool(choices.seen["r.0"].need_prefill))
        await gateway.assign("r", gone)
        await gateway.until(lambda: choices.of_prompt.is_over)
        assert choices.of_prompt.refused is not None
        assert "prefill worker p0" in choices.of_prompt.refused.message
        assert not any(seen.token_ids for seen in choices.seen.values())


@pytest.mark.parametrize("replacement", ["another", "none"])
@pytest.mark.parametrize("aborted", [(), (0,), (1, 2)])
async def test_a_prefill_worker_lost_after_it_has_sampled_changes_no_token(
    start: Start, workers: Workers, monkeypatch: pytest.MonkeyPatch, replacement: str, aborted: Sequence[int]
) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    spare = await start(PrefillWorker, "p1")
    copies = HeldCopies(workers["d0"], monkeypatch)
    prompt, params = prompt_of(150), replace(SAMPLED, prompt_logprobs=1)
    async with gateways(decode, spare) as (gateway, _):
        choices = await Choices(gateway, "r", prompt, params, 4).submit(prefill)
        await choices.have(1)
        gone = [f"r.{i}" for i in aborted]
        await gateway.abort(*gone)
        await workers["p0"].stop()
        copies.release()
        asks = choices.seen[next(name for name in choices.seeds if name not in gone)]
        await gateway.until(lambda: bool(asks.need_prefill))
        await gateway.assign("r", spare if replacement == "another" else None)
        await choices.over(but=gone)
        assert choices.prompt_logprobs() == expected_prompt_logprobs(prompt, params, VOCAB_SIZE)


# --- aborts


STAGES = ("waiting there", "waiting here", "before its first token", "before its commit", "decoding")


@asynccontextmanager
async def at_stage(
    stage: str, start: Start, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Choices, Callable[[], None], GatewayEnd]]:
    """Four choices at this stage, what lets them go on, and a session beside theirs; at the end no block is held."""
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    async with gateways(decode, prefill, decode) as ends:
        neighbours = ends[2]
        choices = Choices(ends[0], "r", prompt_of(200), replace(SAMPLED, max_tokens=60), 4)
        match stage:
            case "waiting there":
                with held_steps(workers["p0"], monkeypatch) as gate:
                    neighbour = await neighbours.submit("neighbour", prompt_of(80, seed=9), greedy(), prefill=prefill)
                    await gate.waiting.wait()
                    await choices.submit(prefill)
                    yield choices, gate.open.set, neighbours
                await neighbours.until(lambda: neighbour.is_over)
                assert neighbour.token_ids == expected(prompt_of(80, seed=9), greedy())
            case "waiting here":
                with held_steps(workers["d0"], monkeypatch) as gate:
                    neighbour = await neighbours.submit("neighbour", prompt_of(80, seed=9), greedy())
                    await gate.waiting.wait()
                    await choices.submit(None)
                    yield choices, gate.open.set, neighbours
                await neighbours.until(lambda: neighbour.is_over)
                assert neighbour.token_ids == expected(prompt_of(80, seed=9), greedy())
            case "before its first token":
                with held_steps(workers["p0"], monkeypatch) as gate:
                    await choices.submit(prefill)
                    await gate.waiting.wait()
                    yield choices, gate.open.set, neighbours
            case "before its commit":
                copies = HeldCopies(workers["d0"], monkeypatch)
                await choices.submit(prefill)
                await choices.have(1)
                yield choices, copies.release, neighbours
                copies.release()
            case "decoding":
                await choices.submit(prefill)
                await choices.have(3)
                yield choices, lambda: None, neighbours


@pytest.mark.parametrize("aborted", [(0,), (2,), (3, 0, 1)])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_choice_may_be_aborted_alone_at_any_stage(
    start: Start, workers: Workers, monkeypatch: pytest.MonkeyPatch, stage: str, aborted: Sequence[int]
) -> None:
    async with at_stage(stage, start, workers, monkeypatch) as (choices, go_on, _):
        gone = [f"r.{i}" for i in aborted]
        await choices.gateway.abort(*gone)
        await choices.gateway.abort(gone[0])
        await heard(choices.gateway)
        go_on()
        await choices.over(but=gone)
        if stage not in ("before its commit", "decoding"):
            assert not any(choices.seen[name].token_ids for name in gone)
        if stage in ("before its first token", "before its commit"):
            await all_given_back(choices.gateway)
            assert num_computed(workers["d0"]) == (4 - len(gone)) * 59, "nothing is computed for who has gone"


@pytest.mark.parametrize("how", ["one by one", "at once", "by their prompt", "with their session"])
@pytest.mark.parametrize("stage", STAGES)
async def test_all_choices_gone_at_any_stage_give_everything_back(
    start: Start, workers: Workers, monkeypatch: pytest.MonkeyPatch, stage: str, how: str
) -> None:
    async with at_stage(stage, start, workers, monkeypatch) as (choices, go_on, neighbours):
        gateway = choices.gateway
        match how:
            case "one by one":
                for name in choices.seeds:
                    await gateway.abort(name)
            case "at once":
                await gateway.abort(*choices.seeds)
            case "by their prompt":
                await gateway.abort("r")
            case "with their session":
                gateway.break_off()
                await gateway.until(lambda: gateway.ended is not None)
        if gateway.ended is None:
            await heard(gateway)
            num_tokens = [len(seen.token_ids) for seen in choices.seen.values()]
        go_on()
        later = await neighbours.submit("later", prompt_of(30, seed=4), greedy())
        await neighbours.until(lambda: later.is_over)
        assert later.token_ids == expected(prompt_of(30, seed=4), greedy())
        if gateway.ended is None:
            assert [len(seen.token_ids) for seen in choices.seen.values()] == num_tokens, "nothing was said of them"


async def heard(gateway: GatewayEnd) -> None:
    """Until the worker has read all that was sent before: it answers a request that makes no sense in its turn."""
    marker = await gateway.submit("marker", [], greedy())
    await gateway.until(lambda: marker.is_over)


async def test_choices_out_of_time_end_together_with_their_prompts_status(start: Start) -> None:
    decode = await start(DecodeWorker, "d0")
    with socket.create_server(("127.0.0.1", 0)) as hung:  # the kernel takes connections, nobody answers
        peer = ("p0", f"127.0.0.1:{hung.getsockname()[1]}")
        async with gateways(decode) as (gateway,):
            choices = await Choices(gateway, "r", prompt_of(40), SAMPLED, 3).submit(peer, timeout_ms=50)
            await gateway.until(lambda: choices.of_prompt.is_over)
            assert choices.of_prompt.refused is not None
            assert choices.of_prompt.refused.code == StatusCode.DEADLINE_EXCEEDED.value[0]


async def test_a_drain_waits_for_the_last_choice(
    start: Start, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = await start(DecodeWorker, "d0")
    async with gateways(decode) as (gateway,):
        with held_steps(workers["d0"], monkeypatch) as gate:
            choices = await Choices(gateway, "r", prompt_of(40), SAMPLED, 3).submit(None)
            await gate.waiting.wait()
            drained = asyncio.ensure_future(gateway.stub.Drain(pb.DrainRequest()))
            await gateway.until(lambda: gateway.load.draining)
            await gateway.abort("r.0", "r.1")
            await heard(gateway)
            assert not drained.done()
        async with asyncio.timeout(PATIENCE_S):
            await drained
        await choices.over(but=("r.0", "r.1"))


async def test_a_prompt_that_the_engine_does_not_take_is_refused_by_its_own_name(start: Start) -> None:
    decode = await start(DecodeWorker, "d0")
    async with gateways(decode) as (gateway,):
        choices = await Choices(gateway, "long", prompt_of(512), SAMPLED, 3).submit(None)
        await gateway.until(lambda: choices.of_prompt.is_over)
        assert choices.of_prompt.refused is not None
        assert choices.of_prompt.refused.code == StatusCode.INVALID_ARGUMENT.value[0]


@pytest.mark.parametrize(
    ("choices", "resume", "word"),
    [
        ({"a": 1}, (), "a prompt of one choice names none"),
        ({"a": 1, "b": 2}, (5,), "2 choices cannot resume"),
        ({"a": 1, "r": 2}, (), "must have a name each"),
    ],
)
async def test_choices_that_make_no_sense_are_refused_and_cost_nothing(
    start: Start, choices: dict[str, int], resume: Sequence[int], word: str
) -> None:
    decode = await start(DecodeWorker, "d0")
    async with gateways(decode) as (gateway,):
        seen = await gateway.submit("r", prompt_of(20), SAMPLED, choices=choices, resume=resume)
        await gateway.until(lambda: seen.is_over or gateway.seen["r"].is_over)
        refused = gateway.seen["r"].refused
        assert refused is not None
        assert refused.code == StatusCode.INVALID_ARGUMENT.value[0]
        assert word in refused.message


@pytest.mark.parametrize(("name", "choices"), [("r", {}), ("other", {"r.1": 1, "x": 2}), ("r.0", {"x": 1, "y": 2})])
async def test_a_name_that_is_in_flight_is_not_taken_twice(
    start: Start, workers: Workers, monkeypatch: pytest.MonkeyPatch, name: str, choices: dict[str, int]
) -> None:
    decode = await start(DecodeWorker, "d0")
    async with gateways(decode, decode) as (gateway, other):
        with held_steps(workers["d0"], monkeypatch):
            first = await Choices(gateway, "r", prompt_of(20), SAMPLED, 2).submit(None)
            kept = dict(gateway.seen)
            await gateway.submit(name, prompt_of(20), SAMPLED, choices=choices)
            twice = gateway.seen[name]
            await gateway.until(lambda: twice.is_over)
            assert twice.refused is not None
            assert twice.refused.code == StatusCode.ALREADY_EXISTS.value[0]
            gateway.seen |= kept
            namesake = await Choices(other, "r", prompt_of(30), SAMPLED, 2).submit(None)
        await first.over()
        await namesake.over()

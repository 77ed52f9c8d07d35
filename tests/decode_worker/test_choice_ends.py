"""Several choices of one prompt on real workers: lost, aborted, late or refused, each ends alone or all together."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from grpc import StatusCode

from decode_worker import DecodeWorker
from decode_workers import VOCAB_SIZE, Start, all_given_back, expected, greedy, prompt_of
from engine.hash_executor import expected_prompt_logprobs
from gateway_end import PATIENCE_S, GatewayEnd
from prefill_worker import PrefillWorker
from tandem.v1 import worker_pb2 as pb
from worker_choices import SAMPLED, Choices, HeldCopies, Workers, gateways, held_steps, num_computed

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

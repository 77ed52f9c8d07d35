"""A decode worker and its prefill workers, real but for the model, behind real gRPC."""

import asyncio
import socket

import pytest
from grpc import StatusCode

from decode_worker import DecodeWorker
from decode_workers import ENGINE, VOCAB_SIZE, Start, all_given_back, expected, greedy, prompt_of
from engine.config import EngineConfig
from engine.hash_executor import HashExecutor
from engine.sampling_params import SamplingParams
from gateway_end import PATIENCE_S, GatewayEnd
from prefill_worker import PrefillWorker
from step_clock import StepClock
from tandem.v1 import sampling_pb2
from tandem.v1 import worker_pb2 as pb
from worker.config import WorkerConfig
from worker.node import WorkerNode


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64, 65, 200, 480])
async def test_tokens_are_the_same_apart_local_and_warm(start: Start, length: int) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    prompt, params = prompt_of(length), greedy()
    async with GatewayEnd(decode[1]) as gateway:
        for turn, plan in enumerate([prefill, prefill, None, None, prefill]):
            seen = await gateway.submit(f"r{turn}", prompt, params, prefill=plan)
            await gateway.until(lambda seen=seen: seen.is_over)
            assert seen.token_ids == expected(prompt, params)
            assert seen.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
            assert seen.usage is not None
            assert seen.stages is not None
            cached = (length - 1) // 16 * 16 if turn else 0
            assert seen.usage.num_cached_tokens == cached
            assert 0 <= seen.usage.num_local_cached_tokens <= cached
        await all_given_back(gateway)


@pytest.mark.parametrize(("length", "num_steps"), [(1, 1), (64, 1), (65, 2), (200, 4)])
async def test_the_step_that_begins_a_request_is_prefill_and_not_waiting(
    monkeypatch: pytest.MonkeyPatch, length: int, num_steps: int
) -> None:
    clock = StepClock()
    clock.install(monkeypatch)
    worker = DecodeWorker(WorkerConfig(engine=ENGINE, worker_id="d0", executor="hash"), clock.time)
    async with GatewayEnd(await worker.start()) as gateway:
        seen = await gateway.submit("r", prompt_of(length), greedy(3))
        await gateway.until(lambda: seen.is_over)
        assert seen.stages is not None
        assert seen.stages.queued == 0.0
        assert seen.stages.prefill >= num_steps
    await worker.stop()


async def test_every_token_of_many_requests_at_once_is_right_with_a_tiny_pool(start: Start) -> None:
    tiny = EngineConfig(num_blocks=9, max_model_len=128, max_num_batched_tokens=32, max_num_seqs=16)
    prefill = await start(PrefillWorker, "p0", engine=tiny)
    decode = await start(DecodeWorker, "d0", engine=tiny)
    async with GatewayEnd(decode[1]) as gateway:
        for i in range(24):
            plan = prefill if i % 3 else None
            await gateway.submit(f"r{i}", prompt_of(5 + 4 * i, seed=i), greedy(6 + i % 20), prefill=plan)
        await gateway.until(lambda: all(seen.is_over for seen in gateway.seen.values()))
        for i in range(24):
            prompt, params = prompt_of(5 + 4 * i, seed=i), greedy(6 + i % 20)
            assert gateway.seen[f"r{i}"].refused is None
            assert gateway.seen[f"r{i}"].token_ids == expected(prompt, params)
        await all_given_back(gateway)


async def test_seeded_sampling_and_resumed_requests_go_on_as_if_never_moved(start: Start) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    prompt, params = prompt_of(50), SamplingParams(max_tokens=30, seed=-7)
    whole = expected(prompt, params)
    async with GatewayEnd(decode[1]) as gateway:
        for i, (plan, delivered) in enumerate([(prefill, 0), (prefill, 11), (None, 11), (prefill, 29)]):
            seen = await gateway.submit(f"r{i}", prompt, params, prefill=plan, resume=whole[:delivered])
            await gateway.until(lambda seen=seen: seen.is_over)
            assert seen.token_ids == whole[delivered:]
            assert seen.usage is not None
            assert seen.usage.num_cached_tokens <= len(prompt)


async def test_a_request_that_ends_with_its_first_token_needs_no_blocks(start: Start) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    prompt = prompt_of(40)
    first = expected(prompt, greedy(1))[0]
    async with GatewayEnd(decode[1]) as gateway:
        one = await gateway.submit("one", prompt, greedy(1), prefill=prefill)
        stop = await gateway.submit("stop", prompt, greedy(9, stop_token_ids=(first,)), prefill=prefill)
        await gateway.until(lambda: one.is_over and stop.is_over)
        assert (one.token_ids, one.finish_reason) == ([first], sampling_pb2.FINISH_REASON_LENGTH)
        assert (stop.token_ids, stop.finish_reason) == ([first], sampling_pb2.FINISH_REASON_STOP)
        assert stop.matched_token_id == first
        await all_given_back(gateway)


async def test_a_prefix_cached_on_a_third_worker_is_pulled_not_computed(start: Start) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    other = await start(DecodeWorker, "d1")
    prompt, params = prompt_of(100), greedy()
    async with GatewayEnd(other[1]) as gateway:
        seen = await gateway.submit("history", prompt, params)
        await gateway.until(lambda: seen.is_over)
    history = prompt + seen.token_ids
    turn = [*history[:112], *prompt_of(30, seed=5)]
    async with GatewayEnd(decode[1]) as gateway:
        apart = await gateway.submit("apart", turn, params, prefill=prefill, cached_on=(*other, 7))
        await gateway.until(lambda: apart.is_over)
        assert apart.token_ids == expected(turn, params)
        assert apart.usage is not None
        assert apart.usage.num_cached_tokens == 112
        assert apart.usage.num_local_cached_tokens == 0

        longer = [*turn[:128], *prompt_of(9, seed=6)]
        fewer = [*history[:112], *prompt_of(40, seed=7)]
        for name, tokens, blocks, cached in [
            ("local", longer, 8, 128),  # all of `turn` is cached here by now
            ("overrated", fewer, 9, 112),  # the directory had hoped for two blocks more
        ]:
            local = await gateway.submit(name, tokens, params, cached_on=(*other, blocks))
            await gateway.until(lambda local=local: local.is_over)
            assert local.token_ids == expected(tokens, params)
            assert local.usage is not None
            assert local.usage.num_cached_tokens == cached
        await all_given_back(gateway)


async def test_local_prefill_pulls_a_cached_prefix_and_computes_the_rest(start: Start) -> None:
    decode, other = await start(DecodeWorker, "d0"), await start(DecodeWorker, "d1")
    prompt, params = prompt_of(100), greedy()
    async with GatewayEnd(other[1]) as gateway:
        seen = await gateway.submit("history", prompt, params)
        await gateway.until(lambda: seen.is_over)
    async with GatewayEnd(decode[1]) as gateway:
        # The last: what was promised is there only in part, the worker is gone, nothing was promised.
        for i, (salt, blocks, cached) in enumerate([("", 6, 96), ("other tenant", 6, 0)]):
            seen = await gateway.submit(f"r{i}", prompt, params, cached_on=(*other, blocks), cache_salt=salt)
            await gateway.until(lambda seen=seen: seen.is_over)
            assert seen.token_ids == expected(prompt, params)
            assert seen.usage is not None
            assert seen.usage.num_cached_tokens == cached
        await all_given_back(gateway)


async def test_a_lost_prefill_worker_is_replaced_by_another_or_by_none(
    start: Start, workers: dict[str, WorkerNode]
) -> None:
    decode, spare = await start(DecodeWorker, "d0"), await start(PrefillWorker, "p1")
    gone = ("p0", "127.0.0.1:9")  # nobody listens at the discard port
    prompt, params = prompt_of(100), greedy()
    async with GatewayEnd(decode[1]) as gateway:
        for request_id, replacement in (("another", spare), ("none", None)):
            seen = await gateway.submit(request_id, prompt, params, prefill=gone)
            await gateway.until(lambda seen=seen: bool(seen.need_prefill))
            assert seen.need_prefill[0].failed_worker_id == "p0"
            await gateway.assign(request_id, replacement)
            await gateway.until(lambda seen=seen: seen.is_over)
            assert seen.token_ids == expected(prompt, params)
        await all_given_back(gateway)


async def test_a_request_whose_prefill_workers_are_all_lost_fails_naming_the_leg(start: Start) -> None:
    decode = await start(DecodeWorker, "d0", max_repairs=2)
    gone = ("p0", "127.0.0.1:9")
    async with GatewayEnd(decode[1]) as gateway:
        seen = await gateway.submit("r", prompt_of(100), greedy(), prefill=gone)
        for repair in range(2):
            await gateway.until(lambda repair=repair: len(seen.need_prefill) == repair + 1)
            await gateway.assign("r", gone)
        await gateway.until(lambda: seen.is_over)
        assert seen.refused is not None
        assert "prefill worker p0" in seen.refused.message
        assert len(seen.need_prefill) == 2
        await all_given_back(gateway)


async def test_bad_requests_are_refused_with_a_reason_and_cost_nothing(start: Start) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    async with GatewayEnd(decode[1]) as gateway:
        neighbour = await gateway.submit("neighbour", prompt_of(30), greedy(40), prefill=prefill)
        for request_id, prompt, params, word in [
            ("empty", [], greedy(), "empty"),
            ("id", [5, VOCAB_SIZE, 7], greedy(), "1000"),
            ("long", prompt_of(512), greedy(40), "512"),
        ]:
            for plan in (prefill, None):
                seen = await gateway.submit(request_id, prompt, params, prefill=plan)
                await gateway.until(lambda seen=seen: seen.is_over)
                assert seen.refused is not None
                assert seen.refused.code == StatusCode.INVALID_ARGUMENT.value[0]
                assert word in seen.refused.message
        twice = await gateway.submit("neighbour2", prompt_of(30), greedy(400), prefill=prefill)
        await gateway.until(lambda: bool(twice.token_ids))
        await gateway.abort("neighbour2", "never heard of")
        await gateway.until(lambda: neighbour.is_over)
        assert neighbour.token_ids == expected(prompt_of(30), greedy(40))
        await all_given_back(gateway)


async def test_a_prefill_worker_takes_no_requests_and_refuses_other_models(start: Start) -> None:
    prefill = await start(PrefillWorker, "p0")
    async with GatewayEnd(prefill[1]) as gateway:
        seen = await gateway.submit("r", prompt_of(5), greedy())
        await gateway.until(lambda: seen.is_over)
        assert seen.refused is not None
        assert seen.refused.code == StatusCode.FAILED_PRECONDITION.value[0]


@pytest.mark.parametrize("heard", [0, 1, 5])
async def test_a_broken_session_takes_its_requests_along(start: Start, heard: int) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    async with GatewayEnd(decode[1]) as survivor, GatewayEnd(prefill[1]) as of_prefill:
        kept = await survivor.submit("same id", prompt_of(40), greedy(60), prefill=prefill)
        async with GatewayEnd(decode[1]) as gateway:
            for i in range(5):
                await gateway.submit(f"r{i}", prompt_of(200, seed=i), greedy(300), prefill=prefill if i % 2 else None)
            mine = await gateway.submit("same id", prompt_of(20), greedy(400))
            await gateway.until(lambda: len(mine.token_ids) >= heard)
            gateway.break_off()
        await survivor.until(lambda: kept.is_over)
        assert kept.token_ids == expected(prompt_of(40), greedy(60))
        await all_given_back(survivor)
        await all_given_back(of_prefill)


async def test_aborts_at_any_moment_leave_both_pools_whole_and_neighbours_right(start: Start) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    async with GatewayEnd(decode[1]) as gateway, GatewayEnd(prefill[1]) as of_prefill:
        for i in range(40):
            await gateway.submit(f"r{i}", prompt_of(20 + 9 * (i % 20), seed=i), greedy(50), prefill=prefill)
            if i >= 4:
                await gateway.abort(f"r{i - 4}")  # of every age: queued, computing, copying, decoding, over
                await gateway.abort(f"r{i - 4}")
        last = [gateway.seen[f"r{i}"] for i in range(36, 40)]
        await gateway.until(lambda: all(seen.is_over for seen in last))
        for i in range(36, 40):
            prompt = prompt_of(20 + 9 * (i % 20), seed=i)
            assert gateway.seen[f"r{i}"].token_ids == expected(prompt, greedy(50))
        await all_given_back(gateway)
        await all_given_back(of_prefill)


async def test_a_request_out_of_time_ends_with_its_status(start: Start) -> None:
    decode = await start(DecodeWorker, "d0")
    with socket.create_server(("127.0.0.1", 0)) as hung:  # the kernel takes connections, nobody answers
        peer = ("p0", f"127.0.0.1:{hung.getsockname()[1]}")
        async with GatewayEnd(decode[1]) as gateway:
            seen = await gateway.submit("r", prompt_of(40), greedy(), prefill=peer, timeout_ms=50)
            await gateway.until(lambda: seen.is_over)
            assert seen.refused is not None
            assert seen.refused.code == StatusCode.DEADLINE_EXCEEDED.value[0]
            await all_given_back(gateway)


async def test_draining_takes_nothing_new_and_ends_what_is_there(start: Start) -> None:
    decode = await start(DecodeWorker, "d0")
    async with GatewayEnd(decode[1]) as gateway:
        old = await gateway.submit("old", prompt_of(40), greedy(200))
        await gateway.until(lambda: bool(old.token_ids))
        drained = asyncio.ensure_future(gateway.stub.Drain(pb.DrainRequest()))
        await gateway.until(lambda: gateway.load.draining)
        new = await gateway.submit("new", prompt_of(40), greedy())
        await gateway.until(lambda: new.is_over)
        assert new.refused is not None
        assert new.refused.code == StatusCode.FAILED_PRECONDITION.value[0]
        async with asyncio.timeout(PATIENCE_S):
            await drained
        await gateway.until(lambda: old.is_over)
        assert old.token_ids == expected(prompt_of(40), greedy(200))


async def test_a_failing_engine_ends_its_worker_and_tells_everyone(
    start: Start, workers: dict[str, WorkerNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("out of luck")

    decode = await start(DecodeWorker, "d0")
    monkeypatch.setattr(HashExecutor, "execute", fail)
    async with GatewayEnd(decode[1]) as gateway:
        seen = await gateway.submit("r", prompt_of(40), greedy())
        await gateway.until(lambda: seen.is_over)
        assert seen.refused is not None
        assert seen.refused.code == StatusCode.UNAVAILABLE.value[0]
        assert "out of luck" in seen.refused.message
    with pytest.raises(RuntimeError, match="out of luck"):
        async with asyncio.timeout(PATIENCE_S):
            await workers["d0"].wait()

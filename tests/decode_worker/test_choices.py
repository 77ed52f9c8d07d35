"""Several choices of one prompt on real workers, real but for the model: the prompt is computed once."""

from dataclasses import replace

import pytest

from decode_worker import DecodeWorker
from decode_workers import VOCAB_SIZE, Start, all_given_back, expected, greedy, prompt_of
from engine.config import EngineConfig
from engine.executor import ModelOutput, SchedulerOutput
from engine.hash_executor import expected_prompt_logprobs, expected_tokens
from kvtransfer.sampling_wire import prompt_logprobs_from_wire
from prefill_worker import PrefillWorker
from tandem.v1 import sampling_pb2
from worker.node import WorkerNode
from worker_choices import SAMPLED, Choices, Workers, gateways, num_computed

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

"""Texts that cannot be held to their structure to their end, on real workers, real but for the model."""

from dataclasses import replace

import pytest

from decode_worker import DecodeWorker
from decode_workers import ENGINE, VOCAB_SIZE, Start, all_given_back, greedy, prompt_of
from engine.hash_executor import expected_tokens
from engine.model.locate import resolve_model
from engine.sampling_params import SamplingParams
from engine.structure.compiler import StructureCompiler
from engine.structure.grammar import json_rule
from engine.structure.spec import Structure, StructureKind
from engine.tokenizer.tokenizer import Tokenizer
from gateway_end import GatewayEnd
from prefill_worker import PrefillWorker
from tandem.v1 import sampling_pb2
from worker.node import WorkerNode

# The library gives up behind the first brace of such an object; a trial would have found that.
WIDE = json_rule({"type": "object", "properties": {f"p{i}": {} for i in range(600)}})
DEAD_END = Structure(StructureKind.GRAMMAR, f'start: "a call: " wide\nwide: {WIDE}')


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model("smollm2-135m-instruct"))


@pytest.fixture
def params(tokenizer: Tokenizer) -> SamplingParams:
    stops = tuple(sorted(token_id for token_id in tokenizer.eos_token_ids if token_id < VOCAB_SIZE))
    return SamplingParams(max_tokens=60, structure=DEAD_END, stop_token_ids=stops)


def untried(tokenizer: Tokenizer) -> StructureCompiler:
    return StructureCompiler(tokenizer, VOCAB_SIZE, trial=lambda grammar: None)


def before_the_end(tokenizer: Tokenizer, prompt: list[int], params: SamplingParams) -> list[int]:
    """What is generated until the text is given up."""
    matcher = untried(tokenizer).compile(DEAD_END).matcher()
    *tokens, end = expected_tokens(prompt, params, VOCAB_SIZE, max_model_len=ENGINE.max_model_len, matcher=matcher)
    assert end in params.stop_token_ids
    return tokens


async def test_a_text_that_is_given_up_is_aborted_alone_and_among_choices(
    start: Start, workers: dict[str, WorkerNode], tokenizer: Tokenizer, params: SamplingParams
) -> None:
    decode = await start(DecodeWorker, "d0")
    workers["d0"]._structures._compiler = untried(tokenizer)
    prompt, seeds = prompt_of(40), {"c0": 1, "c1": 2}
    async with GatewayEnd(decode[1]) as gateway:
        alone = await gateway.submit("alone", prompt, replace(params, seed=3))
        await gateway.submit("several", prompt, params, choices=seeds)
        beside = await gateway.submit("beside", prompt, greedy())
        seen = {3: alone} | {seed: gateway.seen[name] for name, seed in seeds.items()}
        await gateway.until(lambda: beside.is_over and all(each.is_over for each in seen.values()))
        for seed, each in seen.items():
            whole = before_the_end(tokenizer, prompt, replace(params, seed=seed))
            assert tokenizer.decode(whole) == "a call: {"
            assert each.token_ids[:-1] == whole
            assert each.finish_reason == sampling_pb2.FINISH_REASON_ABORT
            assert each.matched_token_id is None
        assert beside.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
        await all_given_back(gateway)


async def test_a_text_that_is_given_up_by_a_prefill_worker_is_aborted_where_it_is_decoded(
    start: Start, workers: dict[str, WorkerNode], tokenizer: Tokenizer, params: SamplingParams
) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    for worker in workers.values():
        worker._structures._compiler = untried(tokenizer)
    prompt = prompt_of(40)
    delivered = before_the_end(tokenizer, prompt, params)
    async with GatewayEnd(decode[1]) as gateway:
        seen = await gateway.submit("r", prompt, params, resume=delivered, prefill=prefill)
        await gateway.until(lambda: bool(seen.need_prefill))
        assert seen.need_prefill[0].failed_worker_id == "p0"
        await gateway.assign("r", None)
        await gateway.until(lambda: seen.is_over)
        assert seen.finish_reason == sampling_pb2.FINISH_REASON_ABORT
        assert len(seen.token_ids) == 1  # the end, which nobody shows
        await all_given_back(gateway)


async def test_a_trial_refuses_it_before(start: Start, params: SamplingParams) -> None:
    decode = await start(DecodeWorker, "d0")
    async with GatewayEnd(decode[1]) as gateway:
        seen = await gateway.submit("r", prompt_of(40), params)
        await gateway.until(lambda: seen.is_over)
        assert seen.refused is not None
        assert "too complex" in seen.refused.message

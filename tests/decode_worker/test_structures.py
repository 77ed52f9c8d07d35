"""Requests that are held to a structure, on real workers, real but for the model."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from grpc import StatusCode

from decode_worker import DecodeWorker
from decode_workers import ENGINE, VOCAB_SIZE, Start, all_given_back, greedy, prompt_of
from engine.hash_executor import expected_tokens
from engine.model.locate import resolve_model
from engine.sampling_params import SamplingParams
from engine.structure.compiler import StructureCompiler
from engine.structure.spec import Structure, StructureKind
from engine.tokenizer.tokenizer import Tokenizer
from gateway_end import PATIENCE_S, GatewayEnd
from prefill_worker import PrefillWorker
from tandem.v1 import sampling_pb2
from worker.node import WorkerNode

PATTERN = "[a-f]{3,40}[0-9]{2}"
REGEX = Structure(StructureKind.REGEX, PATTERN)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model("smollm2-135m-instruct"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> StructureCompiler:
    return StructureCompiler(tokenizer, VOCAB_SIZE)


@pytest.fixture
def params(tokenizer: Tokenizer) -> SamplingParams:
    stops = tuple(sorted(token_id for token_id in tokenizer.eos_token_ids if token_id < VOCAB_SIZE))
    return SamplingParams(max_tokens=60, structure=REGEX, stop_token_ids=stops)


def expected(compiler: StructureCompiler, prompt: list[int], params: SamplingParams) -> list[int]:
    assert params.structure is not None
    matcher = compiler.compile(params.structure).matcher()
    return expected_tokens(prompt, params, VOCAB_SIZE, max_model_len=ENGINE.max_model_len, matcher=matcher)


@contextmanager
def held_compiler(worker: WorkerNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is compiled there before the event is set."""
    opened = threading.Event()
    structures = worker._role._context.structures
    loaded = structures._loaded

    def loaded_when_open() -> StructureCompiler:
        assert opened.wait(PATIENCE_S)
        return loaded()

    monkeypatch.setattr(structures, "_loaded", loaded_when_open)
    try:
        yield opened
    finally:
        opened.set()


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("length", [5, 100])
async def test_texts_fit_the_structure_apart_and_local_alone_and_as_choices(
    start: Start, tokenizer: Tokenizer, compiler: StructureCompiler, params: SamplingParams, length: int, apart: bool
) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    plan, prompt = (prefill if apart else None), prompt_of(length)
    seeds = {f"c{i}": 70 + i for i in range(3)}
    async with GatewayEnd(decode[1]) as gateway:
        alone = await gateway.submit("alone", prompt, replace(params, seed=9), prefill=plan)
        await gateway.submit("several", prompt, params, prefill=plan, choices=seeds)
        seen = {"alone": alone} | {name: gateway.seen[name] for name in seeds}
        await gateway.until(lambda: all(each.is_over for each in seen.values()))
        for name, seed in {"alone": 9, **seeds}.items():
            token_ids = seen[name].token_ids
            assert token_ids == expected(compiler, prompt, replace(params, seed=seed))
            assert re.fullmatch(PATTERN, tokenizer.decode(token_ids))
        await all_given_back(gateway)


async def test_a_text_goes_on_identically_wherever_it_is_resumed(
    start: Start, compiler: StructureCompiler, params: SamplingParams
) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    prompt = prompt_of(40)
    whole = expected(compiler, prompt, params)
    async with GatewayEnd(decode[1]) as gateway:
        for num_delivered in range(len(whole)):
            rest = await gateway.submit(
                f"r{num_delivered}",
                prompt,
                params,
                resume=whole[:num_delivered],
                prefill=prefill if num_delivered % 2 else None,
            )
            await gateway.until(lambda rest=rest: rest.is_over)
            assert rest.token_ids == whole[num_delivered:]


@pytest.mark.parametrize("apart", [True, False])
async def test_a_structure_that_is_no_good_is_refused_and_costs_nothing(
    start: Start, params: SamplingParams, apart: bool
) -> None:
    prefill, decode = await start(PrefillWorker, "p0"), await start(DecodeWorker, "d0")
    bad = replace(params, structure=Structure(StructureKind.REGEX, "(unclosed"))
    async with GatewayEnd(decode[1]) as gateway:
        for choices in (None, {"c0": 1, "c1": 2}):
            seen = await gateway.submit("bad", prompt_of(40), bad, prefill=prefill if apart else None, choices=choices)
            await gateway.until(lambda seen=seen: seen.is_over)
            assert seen.refused is not None
            assert seen.refused.code == StatusCode.INVALID_ARGUMENT.value[0]
            assert "regex" in seen.refused.message
        after = await gateway.submit("after", prompt_of(40), greedy())
        await gateway.until(lambda: after.is_over)
        assert after.refused is None
        await all_given_back(gateway)


async def test_an_abort_before_the_structure_is_compiled_leaves_nothing_behind(
    start: Start,
    workers: dict[str, WorkerNode],
    compiler: StructureCompiler,
    params: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = await start(DecodeWorker, "d0")
    prompt, seeds = prompt_of(40), {f"c{i}": i for i in range(3)}
    async with GatewayEnd(decode[1]) as gateway:
        with held_compiler(workers["d0"], monkeypatch) as opened:
            await gateway.submit("alone", prompt, params)
            await gateway.submit("several", prompt, params, choices=seeds)
            await gateway.submit("gone", prompt, params, choices={"g0": 1, "g1": 2})
            await gateway.abort("alone", "c1", "g0", "g1")
            free = await gateway.submit("free", prompt, greedy())  # waits for nobody's structure
            await gateway.until(lambda: free.is_over)
            opened.set()
            left = {name: gateway.seen[name] for name in ("c0", "c2")}
            await gateway.until(lambda: all(each.is_over for each in left.values()))
        for name, seen in left.items():
            assert seen.token_ids == expected(compiler, prompt, replace(params, seed=seeds[name]))
        assert not any(gateway.seen[name].token_ids for name in ("alone", "c1", "g0", "g1"))
        await all_given_back(gateway)


async def test_a_text_that_the_structure_ends_is_not_drawn_out_to_min_tokens(
    start: Start, tokenizer: Tokenizer, params: SamplingParams
) -> None:
    decode = await start(DecodeWorker, "d0")
    short = replace(params, structure=Structure.of_choices(["yes"]), min_tokens=30)
    async with GatewayEnd(decode[1]) as gateway:
        seen = await gateway.submit("short", prompt_of(20), short)
        await gateway.until(lambda: seen.is_over)
        assert tokenizer.decode(seen.token_ids) == "yes"
        assert seen.finish_reason == sampling_pb2.FINISH_REASON_STOP
        assert seen.matched_token_id == seen.token_ids[-1]
        assert sum(token_id in params.stop_token_ids for token_id in seen.token_ids) == 1


class NoMemory:
    """A compiler on a machine that can start no process."""

    def known(self, structure: Structure) -> None:
        return None

    def compile(self, structure: Structure) -> None:
        raise OSError("fork: cannot allocate memory")

    def close(self) -> None:
        """Nothing runs."""


async def test_a_decode_worker_that_cannot_compile_is_lost_to_the_request_not_the_request_at_fault(
    start: Start, workers: dict[str, WorkerNode], params: SamplingParams
) -> None:
    decode = await start(DecodeWorker, "d0")
    workers["d0"]._structures._compiler = NoMemory()
    async with GatewayEnd(decode[1]) as gateway:
        seen = await gateway.submit("r", prompt_of(40), params)
        await gateway.until(lambda: seen.is_over)
        assert seen.refused is not None
        assert seen.refused.code == StatusCode.UNAVAILABLE.value[0]
        assert "fork" not in seen.refused.message
        await all_given_back(gateway)


async def test_a_prefill_worker_that_cannot_compile_is_replaced(
    start: Start, workers: dict[str, WorkerNode], compiler: StructureCompiler, params: SamplingParams
) -> None:
    poor, rich = await start(PrefillWorker, "p0"), await start(PrefillWorker, "p1")
    decode = await start(DecodeWorker, "d0")
    workers["p0"]._structures._compiler = NoMemory()
    prompt = prompt_of(40)
    async with GatewayEnd(decode[1]) as gateway:
        seen = await gateway.submit("r", prompt, params, prefill=poor)
        await gateway.until(lambda: bool(seen.need_prefill))
        assert seen.need_prefill[0].failed_worker_id == "p0"
        await gateway.assign("r", rich)
        await gateway.until(lambda: seen.is_over)
        assert seen.token_ids == expected(compiler, prompt, params)
        await all_given_back(gateway)


async def test_requests_that_wait_for_their_structure_count_as_waiting(
    start: Start, workers: dict[str, WorkerNode], params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = await start(DecodeWorker, "d0", engine=replace(ENGINE, max_waiting=3))
    async with GatewayEnd(decode[1]) as gateway:
        with held_compiler(workers["d0"], monkeypatch) as opened:
            waiting = [await gateway.submit(f"r{i}", prompt_of(9), params) for i in range(3)]
            await gateway.until(lambda: gateway.load.num_waiting == 3)
            for name, more in (("held", params), ("free", greedy())):
                seen = await gateway.submit(name, prompt_of(9), more)
                await gateway.until(lambda seen=seen: seen.is_over)
                assert seen.refused is not None
                assert seen.refused.code == StatusCode.RESOURCE_EXHAUSTED.value[0]
                assert "3 requests are waiting already" in seen.refused.message
            await gateway.abort("r0")
            await gateway.until(lambda: gateway.load.num_waiting == 2)
            free = await gateway.submit("free again", prompt_of(9), greedy())
            await gateway.until(lambda: free.is_over)
            assert free.refused is None
            opened.set()
            await gateway.until(lambda: all(seen.is_over for seen in waiting[1:]))
        await all_given_back(gateway)

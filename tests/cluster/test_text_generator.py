"""Text out of sequences: the deltas, whatever the chunks they come from."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.choice_chunks import ChoiceChunks
from cluster.errors import WorkerLost
from cluster.generator import SequenceChunk, SequenceRequest
from cluster.sequence_planner import SequencePlanner
from cluster.text_generator import OutputText, TextDelta
from cluster.text_request import PlannedText, TextOptions, TextRequest
from engine.executor import SampledToken
from engine.sampling_params import FinishReason
from fake_generator import FakeGenerator
from gateway_api import Api, embedded_tokenizer, error_of, ticking_clock


async def deltas_of(api: Api, **options: Any) -> list[TextDelta]:
    planned = await api.text.plan(TextRequest(request_id="r", prompt="Hi", options=TextOptions(**options)))
    async with aclosing(api.text.run([planned])) as deltas:
        return [delta async for delta in deltas]


def chunk(tokens: list[int], reason: FinishReason | None = None, matched: int | None = None) -> SequenceChunk:
    return SequenceChunk(tuple(map(SampledToken, tokens)), reason, matched, 0, "p", "d")


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(17, 600) | st.sampled_from([10813, 235, 229, 233, 138]), min_size=1, max_size=30),
    cut=st.lists(st.integers(1, 5), min_size=30, max_size=30),
    stops=st.lists(st.text("aeint ", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 5),
    include_stop=st.booleans(),
)
def test_chunks_of_any_size_give_the_same_text_tokens_and_end(
    ids: list[int], cut: list[int], stops: list[str], min_tokens: int, include_stop: bool
) -> None:
    options = TextOptions(stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=include_stop)

    def run(sizes: list[int]) -> tuple[str, list[int], Any, Any]:
        output = OutputText(embedded_tokenizer(), options)
        text, tokens, rest = "", [], ids
        for size in sizes:
            now, rest = rest[:size], rest[size:]
            delta = output.push(0, chunk(now, None if rest else FinishReason.LENGTH))
            text += delta.text
            tokens += [token.token_id for token in delta.tokens]
            if delta.finish_reason is not None:
                return text, tokens, delta.finish_reason, delta.matched_stop
        raise AssertionError("no end")

    whole = run([len(ids)])
    assert run([1] * len(ids)) == whole
    assert run(cut) == whole
    if whole[3] is None:
        assert whole[0] == embedded_tokenizer().decode(ids)


def test_stop_token_is_no_part_of_the_text_but_of_the_tokens() -> None:
    tokenizer = embedded_tokenizer()
    ids = tokenizer.encode("yes,")
    for include_stop, text in ((False, "yes"), (True, "yes,")):
        output = OutputText(tokenizer, TextOptions(include_stop_str_in_output=include_stop))
        delta = output.push(0, chunk(ids, FinishReason.STOP, ids[-1]))
        assert (delta.text, len(delta.tokens), delta.matched_stop) == (text, len(ids), ids[-1])


async def test_sequence_is_closed_when_its_stop_string_is_complete() -> None:
    ids = embedded_tokenizer().encode("one two three four")
    api = Api(FakeGenerator(script=lambda request: ids))
    deltas = await deltas_of(api, max_tokens=50, stop=("three",))
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].matched_stop == "three"
    assert api.generator.closed == ["r-0"]
    assert api.generator.finished == []


async def test_other_choices_go_on_when_one_has_stopped() -> None:
    tokenizer = embedded_tokenizer()
    scripts = {"r-0": tokenizer.encode("a stop b"), "r-1": tokenizer.encode("one two three four five six")}
    api = Api(FakeGenerator(script=lambda request: scripts[request.request_id]))
    deltas = await deltas_of(api, n=2, max_tokens=6, stop=("stop",))
    texts = ["".join(delta.text for delta in deltas if delta.index == index) for index in range(2)]
    assert texts == ["a ", "one two three four five six"]
    reasons = {delta.index: delta.finish_reason for delta in deltas if delta.finish_reason}
    assert reasons == {0: FinishReason.STOP, 1: FinishReason.LENGTH}


async def test_prompt_of_several_choices_is_computed_and_counted_once() -> None:
    asked: list[int] = []

    class Generator(FakeGenerator):
        def generate_choices(self, requests: Sequence[SequenceRequest]) -> list[AsyncGenerator[SequenceChunk, None]]:
            asked.append(len(requests))
            return super().generate_choices(requests)

    api = Api(Generator(num_cached_tokens=1))
    request = TextRequest(request_id="r", prompt=[300, 301, 302], options=TextOptions(n=4, max_tokens=2))
    other = TextRequest(request_id="other", prompt=[300, 301], options=TextOptions(max_tokens=2))
    async with aclosing(api.text.run(await api.text.plan_all([request, other]))) as deltas:
        assert [delta.num_cached_tokens async for delta in deltas] == [1] * 10
    assert asked == [4, 1]
    for name, count in (("tandem_prompt_tokens_total", 5.0), ("tandem_cached_prompt_tokens_total", 2.0)):
        (line,) = [line for line in api.server_metrics().splitlines() if line.startswith(f"{name}{{")]
        assert float(line.split()[-1]) == count


@pytest.mark.parametrize("n", [1, 3])
async def test_log_probabilities_of_the_prompt_come_with_the_first_delta_of_each_choice(n: int) -> None:
    deltas = await deltas_of(Api(), n=n, max_tokens=3, prompt_logprobs=2)
    for index in range(n):
        first, *others = [delta for delta in deltas if delta.index == index]
        assert first.prompt_logprobs is not None
        assert [token.token_id for token in first.prompt_logprobs] == embedded_tokenizer().encode("Hi")[1:]
        assert all(delta.prompt_logprobs is None for delta in others)


@pytest.mark.parametrize("n", [1, 3])
async def test_token_that_is_generated_for_the_prompts_log_probabilities_alone_is_not_shown(n: int) -> None:
    ids = embedded_tokenizer().encode("no")
    api = Api(FakeGenerator(script=lambda request: ids))
    options = TextOptions(n=n, max_tokens=0, prompt_logprobs=2, logprobs=1, stop_token_ids=(ids[0],), stop=("no",))
    planned = await api.text.plan(TextRequest(request_id="r", prompt=[300, 301], options=options))
    async with aclosing(api.text.run([planned])) as deltas:
        said = [delta async for delta in deltas]
    assert sorted(delta.index for delta in said) == list(range(n))
    for delta in said:
        assert (delta.text, delta.tokens, delta.finish_reason) == ("", (), FinishReason.LENGTH)
        assert delta.matched_stop is None
        assert delta.prompt_logprobs is not None
        assert [token.token_id for token in delta.prompt_logprobs] == [301]
    assert [request.params.max_tokens for request in api.generator.requests] == [1] * n
    assert sorted(api.generator.closed) == sorted(request.request_id for request in api.generator.requests)


async def test_without_log_probabilities_nothing_runs_for_no_tokens() -> None:
    api = Api()
    deltas = await deltas_of(api, max_tokens=0, n=2)
    assert [(delta.index, delta.tokens, delta.finish_reason) for delta in deltas] == [
        (0, (), FinishReason.LENGTH),
        (1, (), FinishReason.LENGTH),
    ]
    assert api.generator.requests == []


async def test_choices_that_nobody_came_to_read_are_closed_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be at a worker all the same, by way of one that was read."""
    closed: list[int] = []

    class Generator(FakeGenerator):
        def generate_choices(self, requests: Sequence[SequenceRequest]) -> list[AsyncGenerator[SequenceChunk, None]]:
            choices = super().generate_choices(requests)
            return [ChoiceChunks(chunks, partial(closed.append, i)) for i, chunks in enumerate(choices)]

    async def only_the_first(streams: list[AsyncGenerator[TextDelta, None]]) -> AsyncGenerator[TextDelta, None]:
        async with aclosing(streams[0]):
            yield await anext(streams[0])

    monkeypatch.setattr("cluster.text_generator.interleave", only_the_first)
    deltas = await deltas_of(Api(Generator()), n=3)
    assert len(deltas) == 1
    assert set(closed) == {0, 1, 2}


async def test_indices_count_through_all_prompts() -> None:
    api = Api()
    plans = [
        await api.text.plan(TextRequest(request_id=f"r{i}", prompt="Hi", options=TextOptions(n=n, max_tokens=m)))
        for i, (n, m) in enumerate([(2, 1), (1, 0), (2, 1)])
    ]
    async with aclosing(api.text.run(plans)) as deltas:
        assert sorted([delta.index async for delta in deltas]) == [0, 1, 2, 3, 4]


async def test_failure_of_one_choice_closes_the_others() -> None:
    def script(request: SequenceRequest) -> list[int]:
        if request.request_id == "r-1":
            raise WorkerLost("decode worker d0: gone")
        return [300]

    api = Api(FakeGenerator(script=script))
    with pytest.raises(WorkerLost):
        await deltas_of(api, n=3, max_tokens=100)
    assert len(api.generator.closed) == len(api.generator.requests)


async def test_leaving_closes_every_sequence() -> None:
    api = Api()
    planned = await api.text.plan(TextRequest(request_id="r", prompt="Hi", options=TextOptions(n=4)))
    async with aclosing(api.text.run([planned])) as deltas:
        await anext(deltas)
    assert sorted(api.generator.closed) == sorted(request.request_id for request in api.generator.requests)


async def test_tokens_count_when_their_text_is_kept_back() -> None:
    ids = embedded_tokenizer().encode("the end")
    api = Api(FakeGenerator(script=lambda request: ids))
    api.generator.gate = asyncio.Semaphore(1)
    planned = await api.text.plan(
        TextRequest(request_id="r", prompt="Hi", options=TextOptions(stop=("the end",), max_tokens=9))
    )
    async with aclosing(api.text.run([planned])) as deltas:
        first = await anext(deltas)
        assert (first.text, len(first.tokens)) == ("", 1)


async def test_call_of_more_choices_than_can_ever_run_is_refused_before_any_is_planned() -> None:
    api = Api(FakeGenerator(max_concurrent=1024))
    planned: list[str] = []

    class Counting(SequencePlanner):
        async def plan(self, request: TextRequest) -> PlannedText:
            planned.append(request.request_id)
            return await super().plan(request)

    api.text.planner = Counting(api.generator.model, api.tokenizer, clock=ticking_clock())
    error = error_of(await api.complete(["hi"] * 2048, n=128, max_tokens=1), 400)
    assert error["message"] == "a call may have at most 1024 choices, not 262144 (n for each of 2048 prompts)"
    assert error["param"] == "prompt"
    assert error_of(await api.complete(["hi"] * 9, n=128, max_tokens=1), 400)["param"] == "n"
    assert planned == []
    assert api.generator.requests == []


async def test_call_that_does_not_fit_beside_others_is_refused_as_a_whole() -> None:
    api = Api(FakeGenerator(max_concurrent=4))
    planned = await api.text.plan(TextRequest(request_id="r", prompt="Hi", options=TextOptions(n=2)))
    async with aclosing(api.text.run([planned])) as deltas:
        await anext(deltas)
        for stream in (False, True):
            assert error_of(await api.complete("Hi", n=3, stream=stream), 429)["code"] == "queue_full"
    assert [request.request_id for request in api.generator.requests] == ["r-0", "r-1"]
    assert 'error="QueueFull"' in api.server_metrics()


async def test_other_calls_go_on_while_many_prompts_are_planned() -> None:
    api = Api()
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count_turns())
    await api.text.plan_all([TextRequest(request_id=f"r{i}", prompt="Hi") for i in range(50)])
    counting.cancel()
    assert turns >= 48


async def test_choices_of_a_prompt_share_what_is_large() -> None:
    options = TextOptions(n=3, logit_bias={5: 1.0}, stop_token_ids=(7, 9))
    planned = await Api().text.plan(TextRequest(request_id="r", prompt="Hi", options=options))
    first, *others = planned.sequences
    for other in others:
        assert other.prompt_token_ids is first.prompt_token_ids
        assert other.params.logit_bias is first.params.logit_bias
        assert other.params.stop_token_ids is first.params.stop_token_ids

"""Planning: what a request for text comes down to, and that it needs neither worker nor loop for long."""

import asyncio

import pytest

from cluster.errors import InvalidRequest
from cluster.sequence_planner import SequencePlanner, choice_seed
from cluster.text_request import MAX_LOGIT_BIAS, TextOptions, TextRequest
from engine.structure.spec import MAX_TEXT_BYTES, Structure, StructureKind
from fake_generator import served_model
from gateway_api import embedded_tokenizer, ticking_clock
from kvtransfer.sampling_wire import sampling_params_from_wire, sampling_params_to_wire


def planner(max_model_len: int = 8192) -> SequencePlanner:
    return SequencePlanner(
        served_model(max_model_len=max_model_len), embedded_tokenizer(), clock=ticking_clock(), draw_seed=lambda: 42
    )


async def test_choices_are_sequences_of_one_prompt_with_seeds_of_their_own() -> None:
    planned = await planner().plan(TextRequest(request_id="r", prompt="10", options=TextOptions(n=3, max_tokens=5)))
    assert planned.prompt_token_ids == (33, 32)
    assert [sequence.request_id for sequence in planned.sequences] == ["r-0", "r-1", "r-2"]
    assert [sequence.params.seed for sequence in planned.sequences] == [choice_seed(42, index) for index in range(3)]
    assert planned.sequences[0].params.seed == 42
    assert {sequence.params.max_tokens for sequence in planned.sequences} == {5}


def test_seeds_of_choices_are_fixed_for_ever() -> None:
    golden = [7, 7026320614825720818, -7510571054124726414, -2887241653934676413]
    assert [choice_seed(7, index) for index in range(4)] == golden
    seeds = {choice_seed(seed, index) for seed in (-(2**63), -1, 0, 7, 2**63 - 1) for index in range(128)}
    assert len(seeds) == 5 * 128
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


async def test_rest_of_the_context_is_allowed_when_max_tokens_is_absent() -> None:
    planned = await planner(100).plan(TextRequest(request_id="r", prompt=[5] * 90))
    assert planned.sequences[0].params.max_tokens == 10


async def test_prompt_that_fills_the_context_leaves_no_room() -> None:
    for max_tokens in (None, 1):
        options = TextOptions(max_tokens=max_tokens)
        with pytest.raises(
            InvalidRequest, match="too long: this model's maximum context length is 100 tokens; the prompt has 100"
        ):
            await planner(100).plan(TextRequest(request_id="r", prompt=[5] * 100, options=options))


async def test_prompt_that_fills_the_context_can_be_echoed() -> None:
    options = TextOptions(max_tokens=0)
    planned = await planner(100).plan(TextRequest(request_id="r", prompt=[5] * 100, options=options))
    assert planned.sequences == ()


@pytest.mark.parametrize("n", [1, 3])
async def test_prompt_whose_log_probabilities_are_wanted_is_computed_even_for_no_tokens(n: int) -> None:
    options = TextOptions(n=n, max_tokens=0, prompt_logprobs=5)
    planned = await planner(100).plan(TextRequest(request_id="r", prompt=[5] * 99, options=options))
    assert [(s.params.max_tokens, s.params.prompt_logprobs) for s in planned.sequences] == [(1, 5)] * n
    with pytest.raises(InvalidRequest, match="too long") as caught:
        await planner(100).plan(TextRequest(request_id="r", prompt=[5] * 100, options=options))
    assert caught.value.openai_code == "context_length_exceeded"


async def test_text_held_to_a_structure_cannot_ignore_its_end() -> None:
    structure = Structure(StructureKind.JSON_OBJECT)
    request = TextRequest(request_id="r", prompt=[5], options=TextOptions(structure=structure, ignore_eos=True))
    with pytest.raises(InvalidRequest, match="ignore_eos must not be true") as caught:
        await planner().plan(request)
    assert caught.value.param == "ignore_eos"
    allowed = TextRequest(request_id="r", prompt=[5], options=TextOptions(structure=structure))
    assert (await planner().plan(allowed)).sequences[0].params.structure == structure


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("é" * (MAX_TEXT_BYTES // 2) + "x", "structure.regex has 65537 bytes; at most 65536 are allowed"),
        ("x" * 7_000_000, "structure.regex has 7000000 characters; at most 65536 bytes are allowed"),
        ("a\ud800", "structure.regex has a lone surrogate at character 1"),
    ],
)
async def test_structure_that_no_worker_takes_is_sent_to_none(text: str, message: str) -> None:
    options = TextOptions(structure=Structure(StructureKind.REGEX, text))
    with pytest.raises(InvalidRequest) as caught:
        await planner().plan(TextRequest(request_id="r", prompt=[5], options=options))
    assert (caught.value.message, caught.value.param) == (message, "structure")
    options = TextOptions(structure=Structure(StructureKind.REGEX, "x" * MAX_TEXT_BYTES))
    assert (await planner().plan(TextRequest(request_id="r", prompt=[5], options=options))).sequences


async def test_biases_go_with_every_prompt_so_they_are_few() -> None:
    options = TextOptions(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0))
    planned = await planner().plan(TextRequest(request_id="r", prompt=[5], options=options))
    assert len(planned.sequences[0].params.logit_bias) == MAX_LOGIT_BIAS
    options = TextOptions(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0))
    with pytest.raises(InvalidRequest, match="logit_bias has 1025 tokens; at most 1024 are allowed") as caught:
        await planner().plan(TextRequest(request_id="r", prompt=[5], options=options))
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1])
async def test_priority_that_workers_cannot_be_told_is_refused(priority: int) -> None:
    options = TextOptions(max_tokens=0, priority=priority)
    with pytest.raises(InvalidRequest, match=f"priority must be a 32-bit integer, not {priority}") as caught:
        await planner().plan(TextRequest(request_id="r", prompt=[5], options=options))
    assert caught.value.param == "priority"


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_end_of_sequence_is_a_stop_token_unless_ignored(ignore_eos: bool) -> None:
    options = TextOptions(max_tokens=1, ignore_eos=ignore_eos, stop_token_ids=(9, 7))
    planned = await planner().plan(TextRequest(request_id="r", prompt=[5], options=options))
    assert planned.sequences[0].params.stop_token_ids == ((7, 9) if ignore_eos else (2, 7, 9))


async def test_long_text_is_tokenized_without_stopping_the_loop() -> None:
    text = "word and another " * 3000
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count_turns())
    ids = await planner(max_model_len=20_000).tokenize(text)
    counting.cancel()
    assert ids == embedded_tokenizer().encode(text)
    assert turns > 1


async def test_text_that_can_never_fit_is_refused_before_it_is_tokenized() -> None:
    with pytest.raises(InvalidRequest, match="characters") as caught:
        await planner(max_model_len=10).tokenize("x" * 1000, param="messages")
    assert (caught.value.param, caught.value.openai_code) == ("messages", "context_length_exceeded")


async def test_zero_tokens_are_still_checked_like_any_request() -> None:
    options = TextOptions(max_tokens=0, temperature=-1.0)
    with pytest.raises(InvalidRequest, match="temperature must be in") as caught:
        await planner().plan(TextRequest(request_id="r", prompt=[5], options=options))
    assert caught.value.param == "temperature"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TextOptions(temperature=1e308), "temperature must be at most 3.40282e+38, not 1e+308"),
        (TextOptions(repetition_penalty=1e300), "repetition_penalty must be at most 3.40282e+38, not 1e+300"),
        (TextOptions(repetition_penalty=1e-310), "repetition_penalty must be at least 1.4013e-45, not 1e-310"),
    ],
)
async def test_number_that_workers_cannot_be_told_is_refused_with_the_value_that_was_sent(
    options: TextOptions, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await planner().plan(TextRequest(request_id="r", prompt=[5], options=options))
    assert caught.value.message == message
    assert caught.value.param == message.partition(" ")[0]


@pytest.mark.parametrize(
    "options",
    [
        TextOptions(temperature=3.40282e38, repetition_penalty=3.40282e38),
        TextOptions(temperature=1e-310, repetition_penalty=1.4013e-45),
    ],
)
async def test_numbers_at_the_ends_of_what_workers_can_be_told_are_taken(options: TextOptions) -> None:
    planned = await planner().plan(TextRequest(request_id="r", prompt=[5], options=options))
    sent = sampling_params_to_wire(planned.sequences[0].params)
    assert sampling_params_from_wire(sent).repetition_penalty > 0

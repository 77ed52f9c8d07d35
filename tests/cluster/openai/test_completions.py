"""`/v1/completions` over a fake generator."""

from typing import Any

import pytest

from fake_generator import FakeGenerator, served_model
from gateway_api import MODEL, Api, embedded_tokenizer, error_of, events, finish_reasons, says, streamed_text

PROMPT = "Once upon a time"


async def greedy(api: Api, **fields: Any) -> dict[str, Any]:
    reply = await api.complete(PROMPT, temperature=0, **fields)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


async def test_completion_has_the_published_form() -> None:
    reply = await Api(FakeGenerator(num_cached_tokens=2)).complete(PROMPT, max_tokens=5)
    body = reply.json()
    choice = body["choices"][0]
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL
    assert body["created"] == 1_800_000_000
    assert body["id"].startswith("cmpl-")
    assert body["system_fingerprint"].startswith("fp_")
    assert choice["index"] == 0
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 5,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert reply.headers["x-tandem-prefill-worker"] == "prefill-0"
    assert reply.headers["x-tandem-decode-worker"] == "decode-0"
    assert reply.headers["x-request-id"]


async def test_sixteen_tokens_are_generated_when_max_tokens_is_absent() -> None:
    assert (await greedy(Api()))["usage"]["completion_tokens"] == 16


async def test_text_ends_at_the_models_end_of_sequence() -> None:
    body = await greedy(Api(says("The end.")), max_tokens=50)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The end.", "stop", None)
    assert body["usage"]["completion_tokens"] == len(embedded_tokenizer().encode("The end.")) + 1


async def test_ignored_end_of_sequence_goes_on_and_stays_out_of_the_text() -> None:
    api = Api(says("No end"))
    body = await greedy(api, max_tokens=5, ignore_eos=True)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["text"] == "No end"
    shown = await greedy(api, max_tokens=5, ignore_eos=True, skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "No end" + "<|im_end|>" * 3


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[369]]),
        (["ab", "10"], [[369], [33, 32]]),
        ([7, 8, 9], [[7, 8, 9]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
async def test_prompt_may_be_text_or_ids_or_a_list_of_either(prompt: Any, ids: list[list[int]]) -> None:
    api = Api()
    reply = await api.complete(prompt, max_tokens=1)
    assert reply.status_code == 200, reply.text
    assert sorted(list(request.prompt_token_ids) for request in api.generator.requests) == sorted(ids)
    assert [choice["index"] for choice in reply.json()["choices"]] == list(range(len(ids)))
    assert reply.json()["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_choices_come_prompt_by_prompt_when_there_are_several_of_each() -> None:
    api = Api()
    prompts = ["The sky is", "My name is"]
    body = (await api.complete(prompts, n=2, max_tokens=3, echo=True)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"].startswith(prompts[i // 2]) for i, choice in enumerate(body["choices"])] == [True] * 4
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens"] == 6


async def test_greedy_choices_are_equal_and_sampled_ones_differ() -> None:
    api = Api()
    equal = await greedy(api, n=3, max_tokens=8)
    assert len({choice["text"] for choice in equal["choices"]}) == 1
    differ = (await api.complete(PROMPT, n=3, max_tokens=8)).json()
    assert len({choice["text"] for choice in differ["choices"]}) == 3


async def test_seed_repeats_every_choice_and_its_first_is_that_of_one_choice() -> None:
    api = Api()
    first, second = [(await api.complete(PROMPT, n=3, seed=7)).json() for _ in range(2)]
    single = (await api.complete(PROMPT, seed=7)).json()
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) == 3
    assert single["choices"][0]["text"] == texts[0]


@pytest.mark.parametrize(("seed", "wrapped"), [(0, 0), (-1, -1), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**70, 0)])
async def test_any_integer_is_a_seed(seed: int, wrapped: int) -> None:
    api = Api()
    assert (await api.complete(PROMPT, seed=seed, max_tokens=1)).status_code == 200
    assert api.generator.requests[0].params.seed == wrapped


async def test_seed_is_drawn_when_it_is_absent() -> None:
    api = Api()
    for _ in range(2):
        await api.complete(PROMPT, max_tokens=1)
    assert len({request.params.seed for request in api.generator.requests}) == 2


async def test_parameters_reach_the_generator() -> None:
    api = Api()
    await api.complete(
        PROMPT,
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        top_k=40,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={"17": -100, "18": 5.5},
        seed=3,
        logprobs=2,
        min_tokens=4,
        stop_token_ids=[99],
        cache_salt="tenant",
        priority=-3,
    )
    (request,) = api.generator.requests
    params = request.params
    assert params.max_tokens == 9
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.25, 40, 0.125)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, -1, 2)
    assert params.logit_bias == {17: -100.0, 18: 5.5}
    assert (params.seed, params.logprobs, params.min_tokens) == (3, 2, 4)
    assert params.stop_token_ids == (2, 99)
    assert (request.cache_salt, request.priority) == ("tenant", -3)


async def test_all_tokens_are_candidates_when_top_k_is_minus_one() -> None:
    api = Api()
    await api.complete(PROMPT, top_k=-1, max_tokens=1)
    assert api.generator.requests[0].params.top_k == 0


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1, "top_p": 0}], ids=["temperature", "top_p"])
async def test_zero_temperature_and_zero_top_p_are_greedy(fields: dict[str, Any]) -> None:
    api = Api()
    await api.complete(PROMPT, max_tokens=1, **fields)
    assert api.generator.requests[0].params.is_greedy


async def test_null_is_absent_and_unknown_fields_are_ignored() -> None:
    api = Api()
    nulls = dict.fromkeys(
        (
            "temperature",
            "top_p",
            "n",
            "max_tokens",
            "stop",
            "seed",
            "logit_bias",
            "logprobs",
            "stream",
            "user",
            "best_of",
        )
    )
    reply = await api.complete(PROMPT, **nulls, no_such_field={"x": 1}, suffix="")
    assert reply.status_code == 200, reply.text


# --- echo, max_tokens 0


async def test_echo_puts_the_prompt_before_the_text_once() -> None:
    api = Api()
    text = (await greedy(api))["choices"][0]["text"]
    assert (await greedy(api, echo=True))["choices"][0]["text"] == PROMPT + text
    assert streamed_text(events(await api.complete(PROMPT, temperature=0, echo=True, stream=True))) == PROMPT + text


async def test_echo_of_token_ids_is_their_text() -> None:
    ids = embedded_tokenizer().encode("🍜 10")
    reply = await Api().complete(ids, echo=True, max_tokens=0)
    assert reply.json()["choices"][0]["text"] == "🍜 10"


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_generated_when_max_tokens_is_zero(stream: bool) -> None:
    api = Api()
    reply = await api.complete(PROMPT, max_tokens=0, echo=True, n=2, stream=stream)
    assert api.generator.requests == []
    if stream:
        assert [finish_reasons(events(reply), i) for i in range(2)] == [["length"], ["length"]]
        assert streamed_text(events(reply), 1) == PROMPT
    else:
        body = reply.json()
        assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == [(PROMPT, "length")] * 2
        assert body["usage"]["completion_tokens"] == 0


# --- stops


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
async def test_stop_string_ends_the_text_before_it_wherever_tokens_are_cut(stream: bool, tokens_per_chunk: int) -> None:
    text = "Anna went to the market, and the rain stopped at noon."
    tokens = embedded_tokenizer().encode(text)
    generator = FakeGenerator(script=lambda request: tokens, tokens_per_chunk=tokens_per_chunk)
    api = Api(generator)
    reply = await api.complete(PROMPT, stop=["never", "e rain st"], max_tokens=40, stream=stream)
    if stream:
        chunks = events(reply)
        assert streamed_text(chunks) == "Anna went to the market, and th"
        assert finish_reasons(chunks) == ["stop"]
    else:
        choice = reply.json()["choices"][0]
        assert choice["text"] == "Anna went to the market, and th"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "e rain st")
        # The tokens after the one that completes the stop string do not count.
        used = next(n for n in range(len(tokens)) if "e rain st" in embedded_tokenizer().decode(tokens[:n]))
        assert reply.json()["usage"]["completion_tokens"] == used
    assert generator.closed == [request.request_id for request in generator.requests]


async def test_stop_string_can_be_included() -> None:
    api = Api(says("one two three"))
    body = (await api.complete(PROMPT, stop=" two", include_stop_str_in_output=True)).json()
    assert body["choices"][0]["text"] == "one two"


async def test_stop_string_counts_only_after_min_tokens() -> None:
    api = Api(says("a b a b a b"))
    body = (await api.complete(PROMPT, stop=" b", min_tokens=3)).json()
    assert body["choices"][0]["text"] == "a b a"


async def test_kept_back_text_leaves_when_the_sequence_ends_otherwise() -> None:
    body = (await Api(says("see you at the")).complete(PROMPT, stop=["the end"])).json()
    assert (body["choices"][0]["text"], body["choices"][0]["stop_reason"]) == ("see you at the", None)


@pytest.mark.parametrize("stop", ["", [""], [], None])
async def test_empty_stop_stops_nothing(stop: Any) -> None:
    api = Api()
    assert await greedy(api, stop=stop) | {"id": ""} == await greedy(api) | {"id": ""}


async def test_stop_token_ends_the_text_and_is_told() -> None:
    comma = embedded_tokenizer().encode(",")[0]
    body = (await Api(says("one, two")).complete(PROMPT, stop_token_ids=[comma])).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", comma)


# --- streams


@pytest.mark.parametrize("text", ["🍜🍣🍱 noodles", "東京 大阪 京都", "ďábelské ódy", "plain"])
async def test_streamed_characters_are_whole_and_join_to_the_unstreamed_text(text: str) -> None:
    api = Api(says(text))
    chunks = events(await api.complete(PROMPT, max_tokens=60, stream=True))
    assert streamed_text(chunks) == text
    assert all("\ufffd" not in choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert (await api.complete(PROMPT, max_tokens=60)).json()["choices"][0]["text"] == text


async def test_character_that_max_tokens_cuts_off_is_told_alike_streamed_or_not() -> None:
    api = Api(says("🍜"))
    whole = (await api.complete(PROMPT, max_tokens=2)).json()["choices"][0]["text"]
    assert streamed_text(events(await api.complete(PROMPT, max_tokens=2, stream=True))) == whole == "\ufffd"


async def test_stream_has_one_head_and_one_end_for_each_choice() -> None:
    reply = await Api().complete(PROMPT, n=3, max_tokens=4, stream=True)
    chunks = events(reply)
    for key in ("id", "created", "model", "object", "system_fingerprint"):
        assert len({chunk[key] for chunk in chunks}) == 1
    assert [finish_reasons(chunks, index) for index in range(3)] == [["length"]] * 3
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)
    assert reply.headers["x-tandem-decode-worker"] == "decode-0"


async def test_usage_comes_in_a_last_chunk_when_it_is_asked_for() -> None:
    api = Api(FakeGenerator(num_cached_tokens=3))
    options = {"include_usage": True}
    *chunks, last = events(await api.complete(PROMPT, n=2, max_tokens=4, stream=True, stream_options=options))
    assert last["choices"] == []
    assert last["usage"] == (await api.complete(PROMPT, n=2, max_tokens=4)).json()["usage"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


async def test_token_ids_are_returned_when_they_are_asked_for() -> None:
    api = Api()
    body = (await api.complete(PROMPT, max_tokens=6, temperature=0, return_token_ids=True)).json()
    choice = body["choices"][0]
    assert choice["prompt_token_ids"] == embedded_tokenizer().encode(PROMPT)
    assert len(choice["token_ids"]) == 6
    assert embedded_tokenizer().decode(choice["token_ids"]) == choice["text"]
    chunks = events(await api.complete(PROMPT, max_tokens=6, temperature=0, return_token_ids=True, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert all("prompt_token_ids" not in later for later in choices[1:])
    assert [token for each in choices for token in each["token_ids"]] == choice["token_ids"]


async def test_token_ids_are_not_returned_when_nobody_asks() -> None:
    choice = (await Api().complete(PROMPT)).json()["choices"][0]
    assert "token_ids" not in choice
    assert "prompt_token_ids" not in choice


# --- what does not fit


@pytest.mark.parametrize(
    ("prompt", "max_tokens"),
    [([5] * 65, 1), ([5] * 64, 1), ([5] * 60, 5), ([[5], [5] * 70], 1), ("word " * 80, 1), ("x" * 10**6, 1)],
    ids=["prompt", "prompt fills all", "both together", "one of a list", "text", "text of a million characters"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_request_over_the_context_is_refused_before_anything_runs(
    prompt: Any, max_tokens: int, stream: bool
) -> None:
    api = Api(FakeGenerator(served_model(max_model_len=64)))
    error = error_of(await api.complete(prompt, max_tokens=max_tokens, stream=stream), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] in ("prompt", "max_tokens")
    assert api.generator.requests == []


async def test_request_that_just_fits_the_context_runs() -> None:
    api = Api(FakeGenerator(served_model(max_model_len=64)))
    assert (await api.complete([5] * 60, max_tokens=4)).json()["usage"]["total_tokens"] == 64

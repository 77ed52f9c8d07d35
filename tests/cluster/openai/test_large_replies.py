"""Replies with many log-probabilities: made in a thread, told once where that is enough, and bounded."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.openai import encoding, logprobs, prompt_logprobs_bound, reply
from cluster.openai.echoed_prompt import EchoedPrompt
from cluster.openai.encoding import encode, encode_large
from cluster.openai.logprobs import CompletionLogprobs
from cluster.openai.prompt_offsets import prompt_offsets
from cluster.text_request import TextOptions, TextRequest
from engine.executor import SampledToken
from engine.tokenizer.tokenizer import Tokenizer
from fake_generator import FakeGenerator
from gateway_api import Api, embedded_tokenizer, error_of, events

PROMPT = list(range(100, 800))
MESSAGE = embedded_tokenizer().decode(PROMPT)


class Threads:
    """Which threads large replies were written in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[threading.Thread] = []
        monkeypatch.setattr(reply, "encode_large", self._encode_large)

    def _encode_large(self, value: Any) -> bytes:
        self.seen.append(threading.current_thread())
        return encode_large(value)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


# --- in a thread


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": PROMPT, "prompt_logprobs": 3},
        {"prompt": PROMPT, "logprobs": 2, "echo": True, "return_token_ids": True},
        {"prompt": [PROMPT, PROMPT[:300]], "logprobs": 1, "echo": True, "prompt_logprobs": 0, "max_tokens": 0},
        {"messages": [{"role": "user", "content": MESSAGE}], "prompt_logprobs": 2},
        {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 20, "max_tokens": 300},
    ],
    ids=["prompt", "echo", "prompts", "chat prompt", "chat"],
)
async def test_reply_is_the_same_from_a_thread(
    fields: dict[str, Any], stream: bool, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    body = {"model": "fake", "n": 2, "max_tokens": 5, "seed": 3, "stream": stream, "request_id": "r", **fields}

    async def answer(inline_size: int) -> Any:
        monkeypatch.setattr(reply, "_INLINE_SIZE", inline_size)
        # In one step, so that the order of a stream's events is given.
        answer = await Api(FakeGenerator(tokens_per_chunk=500)).post(path, body)
        assert answer.status_code == 200, answer.text
        return answer

    inline = await answer(10**9)
    assert threads.seen == []
    apart = await answer(0)
    assert threads.seen
    assert threading.current_thread() not in threads.seen
    assert apart.content == inline.content
    kept = ("content-type", "content-length", "cache-control", "x-tandem-decode-worker")
    assert [apart.headers.get(name) for name in kept] == [inline.headers.get(name) for name in kept]


@pytest.mark.parametrize(
    ("fields", "num_large"),
    [
        ({"prompt_logprobs": 3}, 1),
        ({"logprobs": 3, "echo": True}, 3),
        ({"logprobs": 3}, 0),
        ({"echo": True}, 0),
        ({"prompt_logprobs": 3, "prompt": PROMPT[:50]}, 0),
    ],
    ids=str,
)
async def test_only_events_that_tell_much_are_made_in_a_thread(
    fields: dict[str, Any], num_large: int, threads: Threads
) -> None:
    events(await Api().complete(**{"prompt": PROMPT, "n": 3, "max_tokens": 4, "stream": True, **fields}))
    assert len(threads.seen) == num_large


async def test_whole_reply_is_as_large_as_its_choices_together(threads: Threads) -> None:
    fields: dict[str, Any] = {"max_tokens": 100, "logprobs": True, "top_logprobs": 9}
    assert (await Api().chat("Hi", n=2, **fields)).status_code == 200
    assert threads.seen == []
    assert (await Api().chat("Hi", n=3, **fields)).status_code == 200
    assert len(threads.seen) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=40,
)


@given(value=json_values)
def test_json_that_is_written_by_pieces_is_the_same(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_AT_ONCE", 3)
        for nested in (value, {"choices": [{"logprobs": {"content": value}, "prompt_logprobs": value}]}):
            assert encode_large(nested) == encode(nested).encode()


@pytest.mark.parametrize("num_elements", [0, 1, 255, 256, 257, 512, 1000])
def test_long_lists_are_written_by_pieces(num_elements: int) -> None:
    value = {"choices": [{"prompt_logprobs": [None, *({"a": i} for i in range(num_elements))]}]}
    assert encode_large(value) == encode(value).encode()


# --- told once


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
async def test_the_first_choice_of_a_prompt_tells_its_log_probabilities_for_all(is_chat: bool, stream: bool) -> None:
    api = Api()
    fields: dict[str, Any] = {"n": 3, "max_tokens": 2, "prompt_logprobs": 1, "stream": stream}
    answer = await (api.chat("Hi", **fields) if is_chat else api.complete(["Hello world", "Hi there, you"], **fields))
    objects = events(answer) if stream else [answer.json()]
    choices = [choice for each in objects for choice in each["choices"]]
    told = {choice["index"]: choice["prompt_logprobs"] for choice in choices if "prompt_logprobs" in choice}
    assert sum("prompt_logprobs" in choice for choice in choices) == len(told)
    assert {choice["index"] for choice in choices} == set(range(3 if is_chat else 6))
    lengths = {index: len(told[index]) for index in told}
    prompts = [request.prompt_token_ids for request in api.generator.requests[::3]]
    assert lengths == {3 * number: len(prompt) for number, prompt in enumerate(prompts)}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_echoed_prompt_is_made_once_for_all_its_choices(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
        made.append(len(token_ids))
        return prompt_offsets(tokenizer, token_ids, text)

    monkeypatch.setattr(logprobs, "prompt_offsets", counted)
    prompts = [PROMPT[:40], PROMPT[:50]]
    answer = await Api().complete(
        prompts, n=4, max_tokens=3, logprobs=1, echo=True, return_tokens_as_token_ids=True, stream=stream
    )
    assert sorted(made) == [40, 50]
    told: dict[int, list[str]] = {}
    for each in events(answer) if stream else [answer.json()]:
        for choice in each["choices"]:
            told.setdefault(choice["index"], []).extend(choice["logprobs"]["tokens"])
    spelled = {index: [f"token_id:{token_id}" for token_id in prompts[index // 4]] for index in range(8)}
    assert {index: tokens[:-3] for index, tokens in told.items()} == spelled


async def test_echoed_prompt_is_let_go_of_with_the_last_choice() -> None:
    request = TextRequest(request_id="r", prompt=[5, 6], options=TextOptions(n=2))
    echoed = EchoedPrompt(embedded_tokenizer(), await Api().text.planner.plan(request))
    tokens = [SampledToken(6, -1.0)]
    choices = [CompletionLogprobs(embedded_tokenizer(), 0, skip_special_tokens=True) for _ in range(2)]
    first = echoed.lists(choices[0], tokens)
    assert echoed.lists(choices[1], tokens) is first
    assert echoed.lists(choices[0], tokens) is not first


# --- bounded


@pytest.mark.parametrize(
    ("fields", "num_told", "param"),
    [
        ({"prompt": PROMPT, "prompt_logprobs": 20}, 700 * 21, "prompt_logprobs"),
        ({"prompt": PROMPT, "prompt_logprobs": 20, "n": 9}, 700 * 21, "prompt_logprobs"),
        ({"prompt": PROMPT, "logprobs": 4, "echo": True, "n": 9}, 700 * 9 * 5, "logprobs"),
        ({"prompt": PROMPT, "logprobs": 4, "echo": True, "prompt_logprobs": 1}, 700 * 7, "logprobs"),
        ({"prompt": [PROMPT, PROMPT[:10]], "logprobs": 0, "echo": True, "n": 2}, 710 * 2, "logprobs"),
    ],
)
async def test_reply_tells_so_many_log_probabilities_of_prompts_and_no_more(
    fields: dict[str, Any], num_told: int, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api()
    monkeypatch.setattr(prompt_logprobs_bound, "MAX_PROMPT_LOGPROBS", num_told)
    assert (await api.complete(max_tokens=1, **fields)).status_code == 200
    monkeypatch.setattr(prompt_logprobs_bound, "MAX_PROMPT_LOGPROBS", num_told - 1)
    num_run = len(api.generator.requests)
    for stream in (False, True):
        error = error_of(await api.complete(max_tokens=1, stream=stream, **fields), 400)
        assert error["param"] == param
        assert f"make {num_told}, and a reply may tell {num_told - 1} at most" in error["message"]
    assert len(api.generator.requests) == num_run


async def test_conversation_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs_bound, "MAX_PROMPT_LOGPROBS", 20)
    assert error_of(await Api().chat("Hi", prompt_logprobs=20), 400)["param"] == "prompt_logprobs"
    assert (await Api().chat("Hi", logprobs=True, top_logprobs=20)).status_code == 200


@pytest.mark.parametrize(
    "asked",
    [
        {"num_choices": 4, "prompt_logprobs": None, "echoed_logprobs": 5},
        {"num_choices": 16, "prompt_logprobs": 20, "echoed_logprobs": 5},
        {"num_choices": 128, "prompt_logprobs": 20, "echoed_logprobs": None},
        {"num_choices": 1, "prompt_logprobs": None, "echoed_logprobs": 5, "prompt_lengths": [1300] * 128},
    ],
)
def test_evaluations_are_within_the_bound(asked: dict[str, Any]) -> None:
    prompt_logprobs_bound.check_prompt_logprobs(**{"prompt_lengths": [8192], **asked})

"""Chunks and complete messages out of deltas: joined, the chunks are the whole."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.generation.choice import Choice
from cluster.generator import SequenceRequest
from cluster.text_generator import TextDelta
from cluster.text_request import PlannedText, TextOptions
from cluster.tools.call_parser import call_parser
from cluster.tools.call_style import CallStyle
from cluster.tools.tool_use import parse_tool_use
from engine.executor import SampledToken
from engine.sampling_params import FinishReason
from generation_api import check_joined, joined
from tandem.v1 import generation_pb2 as pb

PROMPT = (11, 12, 13)
PROMPT_LOGPROBS = (
    SampledToken(12, -0.5, ((12, -0.5), (7, -1.5))),
    SampledToken(13, -4.0, ((9, -0.25), (8, -3.0))),
)
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
CALLS = (
    'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Plzeň", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "大阪"}}\n</tool_call>'
)


def planned(**options: Any) -> PlannedText:
    sequences: tuple[SequenceRequest, ...] = ()
    return PlannedText("r1", TextOptions(**options), None, PROMPT, sequences, 0.0)


def choice(index: int = 0, *, stream: bool = True, ids: bool = False, tools: bool = False, **options: Any) -> Choice:
    use = parse_tool_use(TOOLS if tools else None)
    calls = call_parser(use, CallStyle.HERMES)
    return Choice(planned(**options), index, stream=stream, return_prompt_token_ids=ids, mode=use.mode, calls=calls)


def told(choice: Choice, deltas: Sequence[TextDelta]) -> list[pb.GenerateResponse]:
    return [response for delta in deltas for response in choice.responses(delta)]


def delta(
    text: str = "", *ids: int, end: FinishReason | None = None, index: int = 0, prompt: bool = False, **fields: Any
) -> TextDelta:
    return TextDelta(
        index=index,
        text=text,
        tokens=tuple(SampledToken(i, -0.5, ((i, -0.5), (i + 1, -1.0))) for i in ids),
        finish_reason=end,
        num_cached_tokens=2,
        prompt_logprobs=PROMPT_LOGPROBS if prompt else None,
        **fields,
    )


def test_chunks_joined_are_the_complete_message() -> None:
    deltas = [
        delta("ab", 1, prompt=True),
        delta("", 2),
        delta("č🍜", 3, 4),
        delta("!", end=FinishReason.STOP, matched_stop="?"),
    ]
    responses = told(choice(ids=True, logprobs=1, prompt_logprobs=2), deltas)
    whole = check_joined(responses)[0]
    assert [r.WhichOneof("response") for r in responses] == ["chunk", "chunk", "chunk", "chunk", "complete"]
    assert (whole.text, list(whole.output_ids), whole.finish_reason) == ("abč🍜!", [1, 2, 3, 4], "stop")
    assert whole.matched_stop_str == "?"
    assert (whole.prompt_tokens, whole.completion_tokens, whole.cached_tokens) == (3, 4, 2)
    assert [list(logprobs.top_token_ids) for logprobs in whole.logprobs] == [[1], [2], [3], [4]]
    assert list(whole.prompt_token_ids) == list(PROMPT)
    assert list(whole.prompt_logprobs.logprobs) == [-0.5, -4.0]
    assert list(whole.prompt_logprobs.top_token_ids) == [12, 7, 9, 8]
    assert whole.prompt_logprobs.num_top == 2
    assert [r.chunk.completion_tokens for r in responses[:-1]] == [1, 2, 4, 4]


def test_only_the_complete_message_is_told_without_streaming() -> None:
    deltas = [delta("ab", 1, prompt=True), delta("c", 2, end=FinishReason.LENGTH)]
    (response,) = told(choice(stream=False, ids=True, prompt_logprobs=1), deltas)
    assert response.complete.text == "abc"
    assert list(response.complete.prompt_logprobs.top_token_ids) == [12, 9]
    assert list(response.complete.prompt_token_ids) == list(PROMPT)


def test_what_is_not_asked_for_is_not_told() -> None:
    whole = check_joined(told(choice(), [delta("a", 1), delta("b", 2, end=FinishReason.STOP)]))[0]
    assert not whole.logprobs
    assert not whole.prompt_token_ids
    assert not whole.HasField("prompt_logprobs")


def test_first_choice_alone_tells_of_the_prompt() -> None:
    second = choice(1, ids=True, prompt_logprobs=2)
    responses = told(second, [delta("a", 1, index=1, prompt=True, end=FinishReason.LENGTH)])
    whole = check_joined(responses)[1]
    assert not whole.prompt_token_ids
    assert not whole.HasField("prompt_logprobs")


def test_prompt_is_told_even_if_no_token_is_generated() -> None:
    responses = told(choice(ids=True, prompt_logprobs=2), [delta(end=FinishReason.LENGTH, prompt=True)])
    assert [r.WhichOneof("response") for r in responses] == ["chunk", "complete"]
    whole = check_joined(responses)[0]
    assert whole.completion_tokens == 0
    assert len(whole.prompt_logprobs.logprobs) == 2


def test_stop_token_is_named() -> None:
    (chunk, complete) = told(choice(), [delta("a", 1, end=FinishReason.STOP, matched_stop=1)])
    assert complete.complete.matched_token_id == 1
    assert chunk.HasField("chunk")


@pytest.mark.parametrize("seed", range(8))
def test_calls_are_the_same_however_the_text_is_cut(seed: int) -> None:
    draw = random.Random(seed)
    deltas, rest = [], CALLS
    while rest:
        size = draw.randint(1, 12)
        deltas.append(delta(rest[:size], len(deltas) + 1))
        rest = rest[size:]
    deltas.append(delta("", 2, end=FinishReason.STOP, matched_stop=2))
    responses = told(choice(tools=True), deltas)
    whole = check_joined(responses)[0]
    assert whole.text == "Let me see."
    assert [call.name for call in whole.tool_calls] == ["weather", "weather"]
    assert [json.loads(call.arguments) for call in whole.tool_calls] == [{"city": "Plzeň", "days": 2}, {"city": "大阪"}]
    assert len({call.id for call in whole.tool_calls}) == 2
    assert whole.finish_reason == "tool_calls"
    for response in responses[:-1]:
        indices = [piece.index for piece in response.chunk.tool_calls]
        assert len(indices) == len(set(indices)), "a call is told of twice in a chunk"


def test_call_that_is_cut_off_ends_for_the_reason_that_cut_it() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Pl'
    whole = check_joined(told(choice(tools=True), [delta(text, 1, end=FinishReason.LENGTH)]))[0]
    assert whole.finish_reason == "length"
    assert whole.tool_calls[0].arguments == '{"city": "Pl'


def test_text_without_calls_is_text() -> None:
    responses = told(choice(tools=True), [delta("<tool", 1), delta(" a", 2, end=FinishReason.STOP)])
    whole = check_joined(responses)[0]
    assert (whole.text, whole.finish_reason) == ("<tool a", "stop")
    assert joined(responses).text == "<tool a"

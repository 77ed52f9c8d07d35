"""Every field that OpenAI's client can send has a fate here: honoured, refused, or passed over with a reason."""

from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from cluster.openai.chat_request import ChatRequest
from cluster.openai.completion_request import CompletionRequest
from cluster.openai.request_fields import RequestFields, StreamOptions
from gateway_api import Api

# What none of these asks for is another text.
PASSED_OVER = {
    "metadata": "a note of the caller's own, for a list of stored calls",
    "store": "calls are not stored",
    "safety_identifier": "nobody is watched here",
    "service_tier": "there is one",
    "prompt_cache_key": "prefixes are found by what is in them",
    "prompt_cache_options": "prefixes are kept as long as there is room",
    "prompt_cache_retention": "prefixes are kept as long as there is room",
    "prediction": "it could only make the same text come sooner",
    "verbosity": "a wish, which the caller can write into the prompt",
}


def published(module: Any) -> set[str]:
    return set(module.CompletionCreateParamsBase.__annotations__) | {"stream"}


@pytest.mark.parametrize(
    ("module", "request_model"),
    [(completion_params, CompletionRequest), (chat_params, ChatRequest)],
    ids=["completion", "chat"],
)
def test_every_published_field_has_one_fate(module: Any, request_model: type[RequestFields]) -> None:
    honoured, refused = set(request_model.model_fields), set(request_model.unsupported)
    fields = published(module)
    assert len(fields) > 15, "the client's types have been read"
    for field in fields:
        fates = [field in honoured, field in refused, field in PASSED_OVER]
        # A field may be known, so that its kind is checked, and refused all the same.
        assert any(fates), f"{field} is not thought of"
        assert not (field in PASSED_OVER and (field in honoured or field in refused)), field


def test_every_published_stream_option_is_known() -> None:
    from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam

    assert set(ChatCompletionStreamOptionsParam.__annotations__) <= set(StreamOptions.model_fields)


async def test_fields_that_are_passed_over_may_hold_anything() -> None:
    for value in (None, "x", {"a": [1]}, True):
        reply = await Api().chat("Hi", max_tokens=1, **dict.fromkeys(PASSED_OVER, value))
        assert reply.status_code == 200, reply.text

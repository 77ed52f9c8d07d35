"""`/v1/chat/completions` over a fake generator."""

from typing import Any

import pytest

from fake_generator import FakeGenerator, served_model
from gateway_api import Api, embedded_tokenizer, error_of, events, finish_reasons, says, streamed_text

CALLS = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]
USER = {"role": "user", "content": "Hi"}


async def prompt_of(api: Api, messages: Any, **fields: Any) -> str:
    """The prompt that a conversation comes down to."""
    reply = await api.chat(messages, max_tokens=1, **fields)
    assert reply.status_code == 200, reply.text
    return embedded_tokenizer().decode(api.generator.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def test_answer_has_the_published_form() -> None:
    reply = await Api(says("Hello.")).chat("Hi", max_tokens=20)
    body = reply.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert reply.headers["x-tandem-prefill-worker"] == "prefill-0"


async def test_prompt_is_the_templates() -> None:
    assert await prompt_of(Api(), [{"role": "system", "content": "Be brief."}, USER]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_developer_speaks_as_the_system() -> None:
    prompts = [await prompt_of(Api(), [{"role": role, "content": "x"}, USER]) for role in ("system", "developer")]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "x"}],
        [USER, USER],
        [USER, {"role": "assistant", "content": "Yes,"}],
        [{"role": "assistant", "content": "x"}, USER],
        [USER, {"role": "system", "content": "x"}, USER],
        [{**USER, "name": "bob"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": []}],
        [USER, {"role": "function", "name": "f", "content": "1"}],
    ],
)
async def test_unusual_conversations_are_answered(messages: list[dict[str, Any]]) -> None:
    assert (await Api().chat(messages, max_tokens=1)).status_code == 200


async def test_content_in_parts_is_the_same_prompt_as_their_lines() -> None:
    api = Api()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    for role in ("user", "system"):
        assert await prompt_of(api, [{"role": role, "content": parts[:1]}]) == await prompt_of(
            api, [{"role": role, "content": "one"}]
        )
    assert await prompt_of(api, [{"role": "user", "content": parts}]) == await prompt_of(api, "one\ntwo")


async def test_name_of_a_user_changes_nothing() -> None:
    assert await prompt_of(Api(), [{**USER, "name": "bob"}]) == await prompt_of(Api(), [USER])


async def test_null_empty_and_absent_content_beside_tool_calls_are_the_same() -> None:
    prompts = set()
    for content in ({"content": None}, {"content": ""}, {}):
        conversation = [
            USER,
            {"role": "assistant", "tool_calls": CALLS, **content},
            {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
        ]
        prompts.add(await prompt_of(Api(), conversation))
    (prompt,) = prompts
    assert "None" not in prompt
    assert "Sunny" in prompt


@pytest.mark.parametrize("fields", [{"tools": [], "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}])
async def test_empty_tools_are_no_tools(fields: dict[str, Any]) -> None:
    assert (await Api().chat("Hi", max_tokens=1, **fields)).status_code == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([None], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "foo", "content": "hi"}], "messages[0].role"),
        ([{"role": 5, "content": "hi"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {}}], "messages[0].content"),
        ([{"role": "assistant"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "nonsense"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["text"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ],
)
async def test_message_that_is_none_is_refused_by_its_place(messages: Any, param: str) -> None:
    api = Api()
    body = {"model": "fake", "messages": messages}
    assert error_of(await api.post("/v1/chat/completions", body), 400)["param"] == param
    assert api.generator.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"echo": True}, "echo"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    error = error_of(await Api().chat("Hi", **fields), 400)
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"a": "b"}, "store": True, "user": "u", "safety_identifier": "s", "service_tier": "flex"},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}},
        {"reasoning_effort": "low", "verbosity": "low", "include_reasoning": True},
        {"prediction": {"type": "content", "content": "x"}, "modalities": ["text"]},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"stop": None, "tools": None, "tool_choice": None, "response_format": None, "echo": False, "functions": []},
        {"add_special_tokens": False, "add_generation_prompt": True, "spaces_between_special_tokens": True},
        {"never_heard_of": {"x": [1]}},
    ],
)
async def test_what_cannot_change_the_answer_is_passed_over(fields: dict[str, Any]) -> None:
    api = Api()
    assert (await api.chat("Hi", max_tokens=1, **fields)).status_code == 200
    assert (await api.chat("Hi", max_tokens=1)).status_code == 200
    with_fields, plain = api.generator.requests
    assert with_fields.prompt_token_ids == plain.prompt_token_ids


async def test_answer_goes_on_to_the_end_of_the_context_when_max_tokens_is_absent() -> None:
    api = Api(FakeGenerator(served_model(max_model_len=64)))
    usage = (await api.chat("Hi")).json()["usage"]
    assert usage["total_tokens"] == 64


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_both_names_bound_the_answer(field: str) -> None:
    assert (await Api().chat("Hi", **{field: 3})).json()["usage"]["completion_tokens"] == 3


async def test_conversation_over_the_context_is_refused_as_the_messages_fault() -> None:
    api = Api(FakeGenerator(served_model(max_model_len=64)))
    error = error_of(await api.chat("word " * 80, stream=True), 400)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


async def test_model_without_chat_template_refuses_to_chat() -> None:
    error = error_of(await Api(chat_template=None).chat("Hi"), 400)
    assert "no chat template" in error["message"]


async def test_stream_begins_with_the_role_and_joins_to_the_answer() -> None:
    api = Api(says("Hello, world."))
    chunks = events(await api.chat("Hi", n=2, max_tokens=20, stream=True))
    for index in range(2):
        deltas = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in deltas[1:])
        assert streamed_text(chunks, index) == "Hello, world."
        assert finish_reasons(chunks, index) == ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_stop_string_holds_back_what_could_become_one_in_a_stream() -> None:
    tokens = embedded_tokenizer().encode("Go now. STOP here")
    api = Api(FakeGenerator(script=lambda request: tokens))
    chunks = events(await api.chat("Hi", stop="STOP here", max_tokens=20, stream=True))
    assert streamed_text(chunks) == "Go now. "
    assert finish_reasons(chunks) == ["stop"]


async def test_token_ids_are_returned_when_they_are_asked_for() -> None:
    api = Api()
    whole = (await api.chat("Hi", max_tokens=4, temperature=0, return_token_ids=True)).json()["choices"][0]
    chunks = events(await api.chat("Hi", max_tokens=4, temperature=0, return_token_ids=True, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == whole["token_ids"]


async def test_variables_reach_the_template() -> None:
    api = Api()
    plain = await prompt_of(api, "Hi")
    assert await prompt_of(api, "Hi", chat_template_kwargs={"enable_thinking": False}) == plain


async def test_last_message_is_gone_on_from() -> None:
    messages = [USER, {"role": "assistant", "content": "It is "}]
    prompt = await prompt_of(Api(), messages, continue_final_message=True, add_generation_prompt=False)
    assert prompt.endswith("<|im_start|>assistant\nIt is ")


async def test_prompt_may_end_without_the_assistants_turn() -> None:
    assert (await prompt_of(Api(), [USER], add_generation_prompt=False)).endswith("Hi<|im_end|>\n")


async def test_going_on_and_beginning_anew_exclude_each_other() -> None:
    reply = await Api().chat("Hi", continue_final_message=True, add_generation_prompt=True)
    assert error_of(reply, 400)["param"] == "continue_final_message"


async def test_client_finds_its_own_id_in_the_reply_and_workers_never_see_it_twice() -> None:
    api = Api()
    for _ in range(2):
        assert (await api.chat("Hi", max_tokens=1, request_id="mine")).json()["id"] == "chatcmpl-mine"
    assert len({request.request_id for request in api.generator.requests}) == 2
    assert error_of(await api.chat("Hi", request_id="a b"), 400)["param"] == "request_id"


async def test_past_call_in_its_old_form_is_the_same_prompt() -> None:
    function = CALLS[0]["function"]
    prompts = [
        await prompt_of(Api(), [USER, {"role": "assistant", **call}, {"role": role, "name": "weather", "content": "x"}])
        for call, role in (({"tool_calls": CALLS}, "tool"), ({"function_call": function}, "function"))
    ]
    assert prompts[0] == prompts[1]

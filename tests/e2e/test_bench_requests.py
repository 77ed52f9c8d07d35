"""`vllm bench serve` against a real gateway: the requests it sends, and all that it reads of the replies.

It takes the first model's id and root, compares tokenizers over /tokenize and /detokenize, and streams with the usage
at the end. Read out of vLLM's benchmarks (endpoint_request_func.py, serve.py); vLLM itself is too large for a test.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway_thread import Endpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROMPT = "Once upon a time, in a small village by the sea, there lived a"
OUTPUT_LENGTH = 20


@pytest.fixture
def http(endpoint: Endpoint) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=endpoint.http_url, headers=endpoint.authorization, timeout=60, trust_env=False
    ) as client:
        yield client


def measured(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str, int, dict[str, int]]:
    """A streamed reply as the benchmark counts it: its text, its chunks with choices, its usage."""
    common = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0}
    text, num_chunks, usage = "", 0, None
    with http.stream("POST", path, json={**body, **common}, headers={"x-request-id": "bench-0"}) as reply:
        assert reply.status_code == 200
        assert reply.headers["x-request-id"] == "bench-0"
        for line in reply.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["choices"]:
                num_chunks += 1
                choice = event["choices"][0]
                text += (choice["text"] if "text" in choice else choice["delta"].get("content")) or ""
            else:
                usage = event["usage"]
    assert usage is not None
    return text, num_chunks, usage


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_completions(http: httpx.Client, endpoint: Endpoint, as_ids: bool, logprobs: int | None) -> None:
    ids = http.post("/tokenize", json={"model": endpoint.model, "prompt": PROMPT, "add_special_tokens": False}).json()
    body = {
        "model": endpoint.model,
        "prompt": ids["tokens"] if as_ids else PROMPT,
        "repetition_penalty": 1.0,
        "max_tokens": OUTPUT_LENGTH,
        "logprobs": logprobs,
    }
    text, num_chunks, usage = measured(http, "/v1/completions", body)
    assert len(text) > OUTPUT_LENGTH
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids["tokens"]), OUTPUT_LENGTH)
    # The times between chunks are told as times between tokens: a chunk for each, but for those that came together.
    assert 2 <= num_chunks <= OUTPUT_LENGTH + 1


def test_chat(http: httpx.Client, endpoint: Endpoint) -> None:
    body = {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        "max_completion_tokens": OUTPUT_LENGTH,
    }
    text, num_chunks, usage = measured(http, "/v1/chat/completions", body)
    assert text
    assert usage["completion_tokens"] == OUTPUT_LENGTH
    assert 2 <= num_chunks <= OUTPUT_LENGTH + 2


def test_first_model_and_its_tokenizer_are_found(http: httpx.Client, endpoint: Endpoint) -> None:
    model = http.get("/v1/models").json()["data"][0]
    assert (model["id"], model["root"]) == (endpoint.model, endpoint.model)
    ids = http.post("/tokenize", json={"model": model["id"], "prompt": PROMPT, "add_special_tokens": False}).json()
    again = http.post("/detokenize", json={"model": model["id"], "tokens": ids["tokens"]}).json()
    assert again["prompt"] == PROMPT
    assert http.get("/metrics").status_code == 200

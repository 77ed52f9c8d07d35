"""The paths beside generation: models, health, version, tokens, request ids."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.worker_info import Role, WorkerLoad
from fake_generator import worker_status
from gateway_api import MODEL, Api, embedded_tokenizer, error_of


async def test_models_lists_the_served_one_with_its_context() -> None:
    api = Api()
    listed = (await api.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model == {
        "id": MODEL,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "tandem",
        "root": MODEL,
        "max_model_len": 8192,
    }
    assert (await api.http.get(f"/v1/models/{MODEL}")).json() == model


async def test_health_follows_the_decode_workers() -> None:
    api = Api()
    assert (await api.http.get("/health")).status_code == 200
    api.generator.statuses = [replace(status, ready=False) for status in api.generator.statuses]
    assert (await api.http.get("/health")).status_code == 503
    api.generator.statuses = []
    assert (await api.http.get("/health")).status_code == 503
    api.generator.statuses = [worker_status("prefill-0", Role.PREFILL)]
    assert (await api.http.get("/health")).status_code == 503


async def test_health_knows_that_a_draining_decode_worker_takes_no_requests() -> None:
    api = Api()
    draining = replace(worker_status("decode-0"), load=WorkerLoad(draining=True))
    api.generator.statuses = [worker_status("prefill-0", Role.PREFILL), draining]
    assert (await api.http.get("/health")).status_code == 503
    api.generator.statuses = [draining, worker_status("decode-1")]
    assert (await api.http.get("/health")).status_code == 200


async def test_version_is_told() -> None:
    assert (await Api().http.get("/version")).json() == {"version": "1.2.3"}


async def test_request_id_is_the_clients_own_or_made_here() -> None:
    api = Api()
    assert (await api.http.get("/version", headers={"x-request-id": "my-id"})).headers["x-request-id"] == "my-id"
    made = {(await api.http.get("/version")).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    for unsound in ("a b", "x" * 200, "é"):
        reply = await api.http.get("/version", headers={"x-request-id": unsound.encode()})
        assert reply.headers["x-request-id"] != unsound
    assert (await api.http.get("/nowhere", headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"


async def test_text_becomes_tokens_and_tokens_text() -> None:
    api = Api()
    body = (await api.post("/tokenize", {"prompt": "10 🍜", "return_token_strs": True})).json()
    ids = embedded_tokenizer().encode("10 🍜")
    assert body["tokens"] == ids
    assert body["count"] == len(ids)
    assert body["max_model_len"] == 8192
    assert body["token_strs"][:2] == ["1", "0"]
    assert (await api.post("/detokenize", {"model": MODEL, "tokens": ids})).json() == {"prompt": "10 🍜"}


async def test_conversation_becomes_the_tokens_of_its_prompt() -> None:
    api = Api()
    messages = [{"role": "user", "content": "Hi"}]
    tokens = (await api.post("/tokenize", {"model": MODEL, "messages": messages})).json()["tokens"]
    await api.chat(messages, max_tokens=1)
    assert tuple(tokens) == api.generator.requests[0].prompt_token_ids
    bare = (await api.post("/tokenize", {"messages": messages, "add_generation_prompt": False})).json()["tokens"]
    assert tokens[: len(bare)] == bare
    assert len(bare) < len(tokens)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/tokenize", {"messages": [{"role": "foo", "content": "x"}]}, 400),
        ("/tokenize", {"prompt": "x" * 10**6}, 400),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [49152]}, 400),
        ("/detokenize", {"tokens": "x"}, 400),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404),
    ],
)
async def test_bad_token_requests_are_refused(path: str, body: Any, status: int) -> None:
    error_of(await Api().post(path, body), status)


async def test_api_description_names_the_bodies() -> None:
    description = (await Api().http.get("/openapi.json")).json()
    body = description["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "prompt"} == set(body["required"])
    assert "temperature" in body["properties"]

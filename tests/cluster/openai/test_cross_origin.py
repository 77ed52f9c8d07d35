"""Pages of other origins: none by default, and those that are allowed as a browser wants to be told."""

import httpx
import pytest

from cluster.api_keys import ApiKeys
from fake_generator import FakeGenerator
from gateway_api import Api, error_of

PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def cors_headers(reply: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.startswith("access-control-")}


async def test_by_default_no_page_is_allowed() -> None:
    api = Api()
    reply = await api.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert (error_of(reply, 405)["code"], cors_headers(reply)) == ("method_not_allowed", {})
    assert cors_headers(await api.http.get("/v1/models", headers={"origin": PAGE})) == {}


@pytest.mark.parametrize("origins", [("*",), ("http://localhost:3000", PAGE)])
async def test_an_allowed_page_is_told_before_it_has_a_key_and_reads_replies_and_errors(
    origins: tuple[str, ...],
) -> None:
    api = Api(FakeGenerator(), allowed_origins=origins, api_keys=ApiKeys(["sesame"]))
    shown = "*" if origins == ("*",) else PAGE
    asked = await api.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == shown
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
    assert "access-control-allow-credentials" not in asked.headers
    assert asked.headers["x-request-id"]

    key = {"authorization": "Bearer sesame"}
    answered = await api.complete(max_tokens=2)
    error_of(answered, 401)  # without a page, and without a key
    for path, headers, status in (
        ("/v1/models", key, 200), ("/v1/models", {}, 401), ("/nothing", key, 404), ("/health", {}, 200)
    ):  # fmt: skip
        reply = await api.http.get(path, headers={"origin": PAGE, **headers})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, shown)
        assert "x-request-id" in reply.headers["access-control-expose-headers"]


async def test_another_page_is_refused_by_an_error_object_and_reads_nothing() -> None:
    api = Api(allowed_origins=("http://localhost:3000",))
    reply = await api.http.options("/v1/chat/completions", headers=PREFLIGHT)
    error = error_of(reply, 400)
    assert error["code"] == "cross_origin_refused"
    assert PAGE in error["message"]
    assert "access-control-allow-origin" not in reply.headers
    assert "access-control-allow-origin" not in (await api.http.get("/v1/models", headers={"origin": PAGE})).headers


async def test_a_method_that_is_not_served_is_refused_to_an_allowed_page_as_well() -> None:
    api = Api(allowed_origins=("*",))
    reply = await api.http.options("/v1/models", headers={**PREFLIGHT, "access-control-request-method": "DELETE"})
    assert error_of(reply, 400)["code"] == "cross_origin_refused"

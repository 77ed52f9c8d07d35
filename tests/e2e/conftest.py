"""What tests of other people's clients share: one gateway over the embedded model, and no way out of the machine."""

import gc
import ipaddress
import os
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from gateway_thread import Endpoint, in_thread
from hash_gateway import running
from served import served

# Before anything imports them: what these would fetch or report.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"
# None of them asks a proxy of the machine's for this machine.
os.environ["NO_PROXY"] = "127.0.0.1,localhost"

API_KEY = "sk-tandem-end-to-end"


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """The embedded model in float32, prompts prefilled apart; for all tests of the session, so small contexts."""
    serving = partial(
        served,
        tmp_path_factory.mktemp("workers"),
        max_local_prefill_tokens=0,
        max_model_len=1024,
        num_blocks=257,
    )
    with in_thread(serving) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def locked_endpoint() -> Iterator[Endpoint]:
    """A gateway that wants a key; its tokens are hashes."""
    with in_thread(partial(running, api_key=["sk-another", API_KEY]), api_key=API_KEY) as endpoint:
        yield endpoint


@pytest.fixture
def leaves_connections() -> Iterator[None]:
    """For clients that leave connections to the garbage collector: it comes here, where it may warn of them."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No client looks for anybody but us."""
    asked: list[str] = []
    look_up = socket.getaddrinfo

    def look_up_here(host: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if not _is_here(name):
            asked.append(name)
            raise socket.gaierror(socket.EAI_NONAME, f"tests look up nobody: {name}")
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_here)
    yield
    assert not asked


def _is_here(name: str | None) -> bool:
    if name in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False

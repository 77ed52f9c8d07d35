"""An OpenAI-compatible server, as a client sees it: models, text, and streams of chunks.

What `chat`, `bench` and `status` share. Nothing here is Tandem's own: any such server will do.
"""

import json
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
_THIS_MACHINE = {"127.0.0.1", "::1", "localhost"}


class ServerError(Exception):
    """The server could not be reached, or answered with an error; the message is one sentence."""


def trust(ca_file: str) -> ssl.SSLContext:
    """For a server whose certificate was signed by one of these authorities.

    Raises:
        ServerError: the file cannot be read, or holds no certificates.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as exc:
        raise ServerError(f"{ca_file} holds no certificates in PEM") from exc
    except OSError as exc:
        raise ServerError(f"{ca_file} cannot be read: {exc.strerror}") from exc


def trust_only(cert_file: str) -> ssl.SSLContext:
    """For a server that must have this very certificate, whatever it is called and whoever signed it."""
    context = ssl.create_default_context(cafile=cert_file)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


@dataclass(frozen=True, slots=True)
class Stream:
    """A streamed answer: its headers, then its chunks as parsed JSON."""

    headers: Mapping[str, str]
    chunks: AsyncIterator[dict[str, Any]]


class ApiClient:
    """A connection pool to one server. An async context manager.

    Args:
        base_url: with or without a trailing `/v1`.
        tls: what is believed of an https server; None: what the system believes.
        timeout_s: for connecting, and between two chunks of an answer.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            # The environment's web proxy does not know this machine's own servers.
            trust_env=urlsplit(self.base_url).hostname not in _THIS_MACHINE,
            verify=tls or True,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            # An open-loop load must never wait for a connection to come free.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> httpx.Response:
        """The response to GET, whatever its status.

        Raises:
            ServerError: there was none.
        """
        with self._transport_errors():
            return await self._http.get(path)

    async def model(self) -> str:
        """The id of the first model that the server serves.

        Raises:
            ServerError: it cannot be asked, or serves none.
        """
        response = await self.get("/v1/models")
        if response.is_error:
            raise ServerError(self._words(response))
        with self._transport_errors():
            models = response.json().get("data") or []
        if not models:
            raise ServerError(f"{self.base_url} serves no model")
        return str(models[0]["id"])

    @asynccontextmanager
    async def stream(self, path: str, payload: Mapping[str, Any]) -> AsyncIterator[Stream]:
        """POSTs and yields the answer's stream; leaving the context early aborts the request.

        Raises:
            ServerError: no connection, an error status, or an error within the stream.
        """
        with self._transport_errors():
            async with self._http.stream("POST", path, json={**payload, "stream": True}) as response:
                if response.is_error:
                    await response.aread()
                    raise ServerError(self._words(response))
                yield Stream(response.headers, self._chunks(response))

    async def _chunks(self, response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        async for line in response.aiter_lines():
            # Server-sent events; comments (keep-alives) and blank lines say nothing.
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            chunk = json.loads(data)
            if error := chunk.get("error"):
                raise ServerError(str(error.get("message") or error))
            yield chunk
        raise ServerError("the server ended its answer in the middle")

    def _words(self, response: httpx.Response) -> str:
        try:
            said = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            said = response.text.strip()[:200] or response.reason_phrase
        return f"{self.base_url} answered {response.status_code}: {said}"

    @contextmanager
    def _transport_errors(self) -> Iterator[None]:
        # The one place where httpx's errors become ours.
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
            if (refused := _certificate_error(exc)) is not None:
                raise ServerError(
                    f"the certificate of {self.base_url} is not trusted: {refused.verify_message}; "
                    "--ca-file names who is"
                ) from exc
            raise ServerError(f"nothing answers at {self.base_url}; is a server running there?") from exc
        except httpx.TimeoutException as exc:
            raise ServerError(f"{self.base_url} did not answer in time") from exc
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as exc:
            raise ServerError(f"{self.base_url!r} is not an http:// or https:// address") from exc
        except httpx.TransportError as exc:
            raise ServerError(f"the connection to {self.base_url} broke: {exc or type(exc).__name__}") from exc
        except json.JSONDecodeError as exc:
            raise ServerError(f"{self.base_url} sent something that is not JSON") from exc


def _certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """The refusal of a certificate that led to `error`, if one did."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error

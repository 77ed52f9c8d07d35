"""A gateway that lives in a thread of its own, for clients that block the thread they run in."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass

from cluster.gateway import Gateway


@dataclass(frozen=True)
class Endpoint:
    """Where a gateway is, and what it calls its model."""

    http_url: str
    grpc_address: str
    model: str
    api_key: str = "none"

    @property
    def base_url(self) -> str:
        """As clients of OpenAI want it."""
        return f"{self.http_url}/v1"

    @property
    def authorization(self) -> dict[str, str]:
        """What a request shows of the key: HTTP's header, or gRPC's metadata."""
        return {"authorization": f"Bearer {self.api_key}"}


@contextmanager
def in_thread(
    serving: Callable[[], AbstractAsyncContextManager[Gateway]], *, api_key: str = "none"
) -> Iterator[Endpoint]:
    """Enters and leaves `serving` in another thread's event loop; what fails there is raised here.

    Args:
        api_key: a key that the gateway takes, if it wants one.
    """
    opened: Future[tuple[Endpoint, Callable[[], object]]] = Future()

    async def live() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        async with serving() as gateway:
            endpoint = Endpoint(
                http_url=gateway.base_url,
                grpc_address=f"127.0.0.1:{gateway.grpc_port}",
                model=gateway.generator.model.served_model_name,
                api_key=api_key,
            )
            opened.set_result((endpoint, lambda: loop.call_soon_threadsafe(over.set)))
            await over.wait()

    with ThreadPoolExecutor(1, thread_name_prefix="gateway") as threads:
        living = threads.submit(asyncio.run, live())
        wait((opened, living), return_when=FIRST_COMPLETED)
        if living.done():
            living.result()
        endpoint, end = opened.result()
        try:
            yield endpoint
        finally:
            end()
            living.result()

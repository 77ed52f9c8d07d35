"""Work that is worth doing only while its client is there."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client has closed the connection; nobody waits for an answer."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of `work`, which is cancelled, and awaited, as soon as the client leaves.

    Args:
        receive: of a request whose body has been read.

    Raises:
        ClientDisconnected: the client left first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

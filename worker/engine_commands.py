"""What the loop asks of an engine: each a command, posted to its thread, answered (if at all) on the loop.

Commands run in the order they were given, so an engine never hears of a request after its abort. A request that is
held to a structure waits here for its matchers first; if it is aborted meanwhile, the engine never hears of it. It
counts as one that waits in the engine.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.engine import Engine
from engine.errors import QueueFull
from engine.executor import TokenMatcher
from engine.request import Request
from kvtransfer.errors import Code
from worker.engine_thread import EngineThread
from worker.structures import Preparation, Structures


@dataclass(slots=True)
class _Preparing:
    """A request, or the prompt of these forks, whose matchers are on their way."""

    request: Request
    forks: list[Request]
    preparation: Preparation


class EngineCommands:
    """The methods of `Engine` that both roles call, from the loop.

    Args:
        max_waiting: requests, those that wait in the engine among them.
    """

    def __init__(self, thread: EngineThread, structures: Structures, max_waiting: int) -> None:
        self._thread = thread
        self._structures = structures
        self._max_waiting = max_waiting
        self._preparing: dict[str, _Preparing] = {}

    def add_request(
        self, request: Request, refused: Callable[[Code, str], None], forks: Sequence[Request] = ()
    ) -> None:
        """Queues the request, or the prompt of these forks; `refused` is called on the loop, with the reason, if the
        engine does not take it, or `params.structure` is no good. Not before this has returned.
        """
        if self._preparing and len(self._preparing) + self._thread.stats.num_waiting >= self._max_waiting:
            full = str(QueueFull(self._max_waiting))
            asyncio.get_running_loop().call_soon(refused, Code.RESOURCE_EXHAUSTED, full)
            return
        structure = request.params.structure
        if structure is None:
            self._add(request, refused, forks)
            return

        def ready(matchers: list[TokenMatcher]) -> None:
            prepared = self._preparing.pop(request.request_id)
            for sampled, matcher in zip(prepared.forks or [request], matchers, strict=False):  # a fork may have gone
                sampled.hold_to(matcher)
            self._add(request, refused, prepared.forks)

        def unfit(code: Code, reason: str) -> None:
            del self._preparing[request.request_id]
            refused(code, reason)

        preparation = self._structures.prepare(structure, max(len(forks), 1), ready, unfit)
        self._preparing[request.request_id] = _Preparing(request, list(forks), preparation)

    def _add(self, request: Request, refused: Callable[[Code, str], None], forks: Sequence[Request]) -> None:
        def add(engine: Engine) -> None:
            try:
                engine.add_request(request, forks)
            except QueueFull as exc:
                self._thread.report(refused, Code.RESOURCE_EXHAUSTED, str(exc))
            except ValueError as exc:
                self._thread.report(refused, Code.INVALID_ARGUMENT, str(exc))

        self._thread.post(add)

    def abort(self, request_id: str) -> None:
        """Ends the request and frees its blocks: no copy into them may be in flight."""
        if (preparing := self._preparing.pop(request_id, None)) is not None:
            preparing.preparation.cancel()
            return
        for preparing in self._preparing.values():
            # Of a prompt in preparation; most often there is none.
            preparing.forks = [fork for fork in preparing.forks if fork.request_id != request_id]

        def abort(engine: Engine) -> None:
            engine.abort(request_id)

        self._thread.post(abort)

    def commit_blocks(self, request_id: str, num_blocks: int) -> None:
        """The leading blocks of a receiving request are real."""
        self._thread.post(lambda engine: engine.commit_blocks(request_id, num_blocks))

    def finish_receiving(
        self,
        request_id: str,
        num_tokens: int,
        first_token: int | None,
        fork_tokens: Mapping[str, int] | None = None,
    ) -> None:
        """A receiving request runs from now on, or its forks do."""

        def finish(engine: Engine) -> None:
            engine.finish_receiving(request_id, num_tokens, first_token, fork_tokens)

        self._thread.post(finish)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Gives back one pin of each of these blocks."""
        self._thread.post(lambda engine: engine.unpin(block_ids))

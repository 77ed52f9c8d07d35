"""For tests of `worker.structures`: a compiler that waits, and requests that wait for it."""

import asyncio
import threading
from functools import partial
from typing import Any

from engine.executor import TokenMatcher
from engine.structure.compiler import StructureCompiler
from engine.structure.spec import Structure, StructureKind
from kvtransfer.errors import Code
from structured import BYTES, byte_tokenizer
from worker.structures import Preparation, Structures

A = Structure(StructureKind.REGEX, "a+")
B = Structure(StructureKind.REGEX, "b+")
BAD = Structure(StructureKind.REGEX, "[a")
FAILED_HERE = (Code.UNAVAILABLE, "the structure could not be compiled here: the worker's log says why")


class Gate:
    """A compiler whose trials wait until they are let through."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)
        self.num_loaded = 0
        self.num_tried = 0

    def new_compiler(self) -> StructureCompiler:
        self.num_loaded += 1
        return StructureCompiler(byte_tokenizer(BYTES), 257, trial=self.trial)

    def trial(self, grammar: str) -> None:
        self.num_tried += 1
        self.entered.release()
        assert self.opened.wait(30)


class Answer:
    """What the callbacks of one request were told."""

    def __init__(self, structures: Structures, structure: Structure, num_matchers: int = 1) -> None:
        self.told: list[Any] = []
        self.event = asyncio.Event()
        self.preparation: Preparation = structures.prepare(structure, num_matchers, self._tell, self._refuse)
        assert self.told == []  # never before `prepare` has returned

    def _refuse(self, code: Code, message: str) -> None:
        self._tell((code, message))

    def _tell(self, what: list[TokenMatcher] | tuple[Code, str]) -> None:
        asyncio.get_running_loop()  # on the loop
        self.told.append(what)
        self.event.set()

    async def only(self) -> Any:
        await asyncio.wait_for(self.event.wait(), 30)
        [what] = self.told
        return what


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(partial(gate.entered.acquire, timeout=30))

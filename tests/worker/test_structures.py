"""From a request's structure to its matchers, on a loop that goes on meanwhile."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from engine.executor import TokenMatcher
from engine.model.locate import EMBEDDED_MODEL
from engine.structure.compiler import StructureCompiler
from engine.structure.spec import Structure, StructureKind
from structured import BYTES, allowed_ids, byte_tokenizer
from worker.structures import Preparation, Structures, model_compiler

A = Structure(StructureKind.REGEX, "a+")
B = Structure(StructureKind.REGEX, "b+")
BAD = Structure(StructureKind.REGEX, "[a")


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


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture
async def structures(gate: Gate) -> AsyncIterator[Structures]:
    structures = Structures(gate.new_compiler)
    yield structures
    gate.opened.set()
    structures.close()


class Answer:
    """What the callbacks of one request were told."""

    def __init__(self, structures: Structures, structure: Structure, num_matchers: int = 1) -> None:
        self.told: list[Any] = []
        self.event = asyncio.Event()
        self.preparation: Preparation = structures.prepare(structure, num_matchers, self._tell, self._tell)
        assert self.told == []  # never before `prepare` has returned

    def _tell(self, what: list[TokenMatcher] | str) -> None:
        asyncio.get_running_loop()  # on the loop
        self.told.append(what)
        self.event.set()

    async def only(self) -> Any:
        await asyncio.wait_for(self.event.wait(), 30)
        [what] = self.told
        return what


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(partial(gate.entered.acquire, timeout=30))


async def test_a_request_gets_a_matcher_for_each_sequence(gate: Gate, structures: Structures) -> None:
    gate.opened.set()
    matchers = await Answer(structures, A, num_matchers=3).only()
    assert [allowed_ids(matcher, []) for matcher in matchers] == [[98]] * 3
    assert allowed_ids(matchers[0], [98]) == [0, 98]
    assert allowed_ids(matchers[1], []) == [98]  # each follows its own


async def test_a_bad_structure_is_refused_with_what_is_wrong(gate: Gate, structures: Structures) -> None:
    gate.opened.set()
    assert await Answer(structures, BAD).only() == "regex cannot be used: unclosed character class"
    assert len(await Answer(structures, A).only()) == 1


async def test_nothing_is_loaded_before_the_first_structure_and_once_then(gate: Gate) -> None:
    threads = {thread.ident for thread in threading.enumerate()}
    structures = Structures(gate.new_compiler)
    assert threads.issuperset(thread.ident for thread in threading.enumerate())
    assert gate.num_loaded == 0
    gate.opened.set()
    answers = [Answer(structures, structure) for structure in (A, B, A, BAD)]
    for answer in answers:
        await answer.only()
    assert gate.num_loaded == 1
    assert gate.num_tried == 3
    structures.close()


async def test_the_loop_goes_on_while_a_structure_is_compiled(gate: Gate, structures: Structures) -> None:
    answer = Answer(structures, A)
    await entered(gate)
    for _ in range(10):
        await asyncio.sleep(0)
    assert answer.told == []
    gate.opened.set()
    assert len(await answer.only()) == 1


async def test_a_slow_structure_does_not_hold_up_another(gate: Gate) -> None:
    def trial(grammar: str) -> None:
        if "a+" in grammar:
            gate.trial(grammar)

    structures = Structures(lambda: StructureCompiler(byte_tokenizer(BYTES), 257, trial=trial))
    slow = Answer(structures, A)
    await entered(gate)
    assert len(await Answer(structures, B).only()) == 1
    assert slow.told == []
    gate.opened.set()
    assert len(await slow.only()) == 1
    structures.close()


async def test_a_request_that_is_dropped_hears_nothing(gate: Gate, structures: Structures) -> None:
    dropped = [Answer(structures, A), Answer(structures, BAD)]
    await entered(gate)
    await entered(gate)
    for answer in dropped:
        answer.preparation.cancel()
        answer.preparation.cancel()
    gate.opened.set()
    assert len(await Answer(structures, B).only()) == 1
    assert [answer.told for answer in dropped] == [[], []]


async def test_what_a_dropped_request_wanted_is_not_compiled_if_it_has_not_begun(
    gate: Gate, structures: Structures
) -> None:
    kept = [Answer(structures, A), Answer(structures, B)]  # as many as there are threads
    await entered(gate)
    await entered(gate)
    waiting = [Answer(structures, Structure(StructureKind.REGEX, f"c{{{n}}}")) for n in range(1, 20)]
    for answer in waiting:
        answer.preparation.cancel()
    gate.opened.set()
    for answer in kept:
        await answer.only()
    await Answer(structures, BAD).only()
    assert gate.num_tried == 3
    assert not any(answer.told for answer in waiting)


async def test_a_request_that_is_dropped_when_it_is_done_hears_nothing(gate: Gate, structures: Structures) -> None:
    gate.opened.set()
    for structure in (A, BAD):
        await Answer(structures, structure).only()
        answer = Answer(structures, structure)
        while not answer.preparation._job.done():
            await asyncio.to_thread(lambda: None)
        # Its callback may be on its way now.
        told_before = list(answer.told)
        answer.preparation.cancel()
        await Answer(structures, A).only()
        assert answer.told == told_before


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (FileNotFoundError("no such model"), "this model cannot be held to structures: no such model"),
        (ValueError("no end"), "this model cannot be held to structures: no end"),
        (KeyError("x"), "the worker could not compile the structure: KeyError: 'x'"),
    ],
)
async def test_a_model_without_a_usable_tokenizer_refuses_and_is_asked_again(
    gate: Gate, problem: Exception, told: str
) -> None:
    new_compilers: list[Callable[[], StructureCompiler]] = [gate.new_compiler]

    def new_compiler() -> StructureCompiler:
        if len(attempts) == 0:
            attempts.append(1)
            raise problem
        return new_compilers[0]()

    attempts: list[int] = []
    gate.opened.set()
    structures = Structures(new_compiler)
    assert await Answer(structures, A).only() == told
    assert len(await Answer(structures, A).only()) == 1
    structures.close()


async def test_what_has_not_begun_at_the_end_is_not_done(gate: Gate) -> None:
    structures = Structures(gate.new_compiler)
    begun = [Answer(structures, A), Answer(structures, B)]
    await entered(gate)
    await entered(gate)
    waiting = Answer(structures, BAD)
    structures.close()
    structures.close()
    gate.opened.set()
    for answer in begun:
        assert len(await answer.only()) == 1
    assert waiting.told == []


def test_a_hash_executor_is_held_to_structures_over_the_models_first_tokens() -> None:
    compiler = model_compiler(EMBEDDED_MODEL, 1000)
    matcher = compiler.compile(Structure(StructureKind.JSON_OBJECT)).matcher()
    assert len(matcher.allowed([])) == -(-1000 // 32)
    assert allowed_ids(matcher, [])


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-model"):
        model_compiler("no-such-model", 1000)

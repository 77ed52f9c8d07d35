"""From a request's structure to its matchers, on a loop that goes on meanwhile."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from engine.executor import TokenMatcher
from engine.model.errors import ModelLoadError
from engine.model.locate import EMBEDDED_MODEL
from engine.structure import trial as trial_module
from engine.structure.compiler import StructureCompiler
from engine.structure.errors import CompilationFailed
from engine.structure.spec import Structure, StructureKind
from kvtransfer.errors import Code
from structured import BYTES, allowed_ids, byte_tokenizer
from worker.structures import Preparation, Structures, model_compiler

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


async def test_a_request_gets_a_matcher_for_each_sequence(gate: Gate, structures: Structures) -> None:
    gate.opened.set()
    matchers = await Answer(structures, A, num_matchers=3).only()
    assert [allowed_ids(matcher, []) for matcher in matchers] == [[98]] * 3
    assert allowed_ids(matchers[0], [98]) == [0, 98]
    assert allowed_ids(matchers[1], []) == [98]  # each follows its own


async def test_a_bad_structure_is_refused_with_what_is_wrong(gate: Gate, structures: Structures) -> None:
    gate.opened.set()
    for _ in range(2):
        told = await Answer(structures, BAD).only()
        assert told == (Code.INVALID_ARGUMENT, "regex cannot be used: unclosed character class")
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
    dropped = [Answer(structures, structure) for structure in (A, BAD, A)]
    await entered(gate)
    await entered(gate)
    for answer in dropped:
        answer.preparation.cancel()
        answer.preparation.cancel()
    gate.opened.set()
    assert len(await Answer(structures, B).only()) == 1
    assert [answer.told for answer in dropped] == [[], [], []]


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
        answer.preparation.cancel()  # what it is told is on its way
        await Answer(structures, structure).only()
        assert answer.told == []


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (ValueError("no end"), (Code.INVALID_ARGUMENT, "this model cannot be held to structures: no end")),
        (FileNotFoundError("/secret/place"), FAILED_HERE),
        (ModelLoadError("/secret/place is no model"), FAILED_HERE),
        (KeyError("x"), FAILED_HERE),
    ],
)
async def test_a_model_without_a_usable_tokenizer_refuses_and_is_asked_again(
    gate: Gate, problem: Exception, told: tuple[Code, str]
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


class Panic(BaseException):
    """As the library's own, which is no `Exception`."""


@pytest.mark.parametrize(
    "problem", [OSError("fork"), MemoryError(), CompilationFailed("/secret/place: no memory"), Panic("at line 5")]
)
async def test_a_fault_of_the_worker_is_not_told_as_the_clients_and_not_remembered(
    problem: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    problems = [problem]

    def trial(grammar: str) -> None:
        if problems:
            raise problems.pop()

    structures = Structures(lambda: StructureCompiler(byte_tokenizer(BYTES), 257, trial=trial))
    assert await Answer(structures, A).only() == FAILED_HERE
    assert type(problem).__name__ in caplog.text  # what it was
    assert len(await Answer(structures, A).only()) == 1
    structures.close()


async def test_who_wants_the_same_structure_takes_no_thread_more(gate: Gate) -> None:
    def trial(grammar: str) -> None:
        if "a+" in grammar:
            gate.trial(grammar)

    structures = Structures(lambda: StructureCompiler(byte_tokenizer(BYTES), 257, trial=trial))
    same = [Answer(structures, A) for _ in range(5)]
    await entered(gate)
    assert len(await Answer(structures, B).only()) == 1
    same[0].preparation.cancel()
    gate.opened.set()
    for answer in same[1:]:
        assert len(await answer.only()) == 1
    assert same[0].told == []
    assert gate.num_tried == 1
    structures.close()


async def test_who_comes_while_a_dropped_structure_is_compiled_joins_it(gate: Gate, structures: Structures) -> None:
    dropped = Answer(structures, A)
    await entered(gate)
    dropped.preparation.cancel()
    joined = Answer(structures, A)
    gate.opened.set()
    assert len(await joined.only()) == 1
    assert gate.num_tried == 1


async def test_what_is_known_or_harmless_is_not_held_up_by_what_is_slow(gate: Gate) -> None:
    def trial(grammar: str) -> None:
        if "a+" not in grammar and "[a" not in grammar:
            gate.trial(grammar)

    structures = Structures(lambda: StructureCompiler(byte_tokenizer(BYTES), 257, trial=trial))
    assert len(await Answer(structures, A).only()) == 1
    assert (await Answer(structures, BAD).only())[0] is Code.INVALID_ARGUMENT
    slow = [Answer(structures, Structure(StructureKind.REGEX, f"c{{{n}}}")) for n in range(1, 9)]
    await entered(gate)
    await entered(gate)
    assert len(await Answer(structures, A).only()) == 1
    assert (await Answer(structures, BAD).only())[0] is Code.INVALID_ARGUMENT
    assert len(await Answer(structures, Structure(StructureKind.JSON_OBJECT)).only()) == 1
    assert len(await Answer(structures, Structure.of_choices(["x", "y"])).only()) == 1
    assert not any(answer.told for answer in slow)
    gate.opened.set()
    for answer in slow:
        await answer.only()
    structures.close()


async def test_requests_in_preparation_are_counted(gate: Gate) -> None:
    seen: list[int] = []
    structures = Structures(gate.new_compiler, lambda: seen.append(structures.num_preparing))
    answers = [Answer(structures, structure) for structure in (A, A, BAD)]
    assert structures.num_preparing == 3
    answers[0].preparation.cancel()
    answers[0].preparation.cancel()
    assert structures.num_preparing == 2
    gate.opened.set()
    for answer in answers[1:]:
        await answer.only()
    assert structures.num_preparing == 0
    assert seen == [1, 2, 3, 2, 1, 0]
    await Answer(structures, A).only()
    assert seen[6:] == [1, 0]
    structures.close()


async def test_a_trial_that_runs_at_the_end_is_ended(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(600)"], **options)
            gate.entered.release()

    monkeypatch.setattr(trial_module.subprocess, "Popen", Endless)
    structures = Structures(lambda: StructureCompiler(byte_tokenizer(BYTES), 257))
    begun = Answer(structures, A)
    await entered(gate)
    structures.close()
    assert await begun.only() == FAILED_HERE
    await asyncio.wait_for(asyncio.to_thread(structures._threads.shutdown), 30)  # as Python does at its exit


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

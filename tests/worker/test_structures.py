"""From a request's structure to its matchers, on a loop that goes on meanwhile."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from engine.model.errors import ModelLoadError
from engine.model.locate import EMBEDDED_MODEL
from engine.structure.compiler import StructureCompiler
from engine.structure.errors import CompilationFailed
from engine.structure.spec import Structure, StructureKind
from kvtransfer.errors import Code
from structure_waiters import BAD, FAILED_HERE, A, Answer, B, Gate, entered
from structured import BYTES, allowed_ids, byte_tokenizer
from worker.structures import Structures, model_compiler


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


def test_a_hash_executor_is_held_to_structures_over_the_models_first_tokens() -> None:
    compiler = model_compiler(EMBEDDED_MODEL, 1000)
    matcher = compiler.compile(Structure(StructureKind.JSON_OBJECT)).matcher()
    assert len(matcher.allowed([])) == -(-1000 // 32)
    assert allowed_ids(matcher, [])


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-model"):
        model_compiler("no-such-model", 1000)

"""Many requests wait for their structures: who waits for whom, who is counted, and what is left at the end."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from engine.structure import trial as trial_module
from engine.structure.compiler import StructureCompiler
from engine.structure.spec import Structure, StructureKind
from kvtransfer.errors import Code
from structure_waiters import BAD, FAILED_HERE, A, Answer, B, Gate, entered
from structured import BYTES, byte_tokenizer
from worker.structures import Structures


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

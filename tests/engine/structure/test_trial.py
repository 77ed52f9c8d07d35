"""Grammars that a client writes to stop a worker, or by mistake."""

import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from engine.structure import trial
from engine.structure.compiler import StructureCompiler
from engine.structure.errors import CompilationFailed
from engine.structure.grammar import grammar_of, json_rule
from engine.structure.spec import Structure, StructureKind
from engine.structure.trial import Trials
from engine.structure.vocabulary import SpecialIds
from structured import BYTES, byte_tokenizer

SPECIAL = SpecialIds(1000, {0: "<eos>", 999: "<tool>"}, [0])
SCHEMA, REGEX, GRAMMAR = StructureKind.JSON_SCHEMA, StructureKind.REGEX, StructureKind.GRAMMAR


def schema(value: dict[str, Any]) -> tuple[StructureKind, str]:
    return SCHEMA, json.dumps(value)


def either_of_two(i: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "object", "required": [f"{letter}{i}"]} for letter in "ab"]}


PRIME = (GRAMMAR, 'start: %json {"type": "integer", "multipleOf": 99999989}')
NASTY = {
    "a large prime": (*PRIME, "too complex: it takes more than"),
    "cross product": (*schema({"allOf": [either_of_two(i) for i in range(20)]}), "schema too large"),
    "intersections": (
        *schema({"allOf": [{"type": "string", "pattern": f"(.*a.{{{i}}}b.*)"} for i in range(20)]}),
        "json_schema|too complex|Unable",
    ),
    "doubling terminals": (
        GRAMMAR,
        "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "a"',
        "too big",
    ),
    "many optional properties": (
        *schema({"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}),
        "too complex: .*items",
    ),
    "nested groups": (REGEX, "(" * 30_000 + "a" + ")" * 30_000, "nested|too large|exceed"),
    "counted three times": (REGEX, "((a{1,100}){1,100}){1,100}|" + "a?" * 2000 + "a" * 2000, "complex|large"),
}

# Of an object with so many optional properties the library gives up behind the first brace.
WIDE = {"type": "object", "properties": {f"p{i}": {} for i in range(600)}}

HARMLESS = {
    "deep": (SCHEMA, '{"items": ' * 60 + "{}" + "}" * 60),
    "doubling references": schema(
        {
            "$ref": "#/$defs/a0",
            "$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)} | {"a30": {}},
        }
    ),
    "exponential automaton": (REGEX, "(a|b)*a(a|b){200}"),
    "backtracking": (REGEX, "(((a*)*)*)*b"),
    "many words": (REGEX, "|".join(f"word{i}" for i in range(5000))),
    "long string": schema({"type": "string", "maxLength": 10**9}),
    "left recursion": (GRAMMAR, 'start: start "a" | start start "b" |'),
    "names special tokens": (GRAMMAR, 'start: <tool> "a" <[998-999]>'),
}


@pytest.mark.parametrize(("kind", "text", "problem"), NASTY.values(), ids=NASTY)
def test_what_would_stop_a_worker_is_refused(kind: StructureKind, text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Trials(SPECIAL)(grammar_of(Structure(kind, text)))


@pytest.mark.parametrize(("kind", "text"), HARMLESS.values(), ids=HARMLESS)
def test_what_the_library_stands_is_not_refused(kind: StructureKind, text: str) -> None:
    Trials(SPECIAL)(grammar_of(Structure(kind, text)))


def test_processor_time_is_bounded() -> None:
    with pytest.raises(ValueError, match=r"it is too complex: it takes more than 0\.01 s to compile"):
        Trials(SPECIAL, max_cpu_s=0.01)(grammar_of(Structure(*PRIME)))


def test_a_compiler_tries_what_clients_wrote_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = StructureCompiler(byte_tokenizer(BYTES), 257)
    with pytest.raises(ValueError, match="grammar cannot be used: it is too complex"):
        compiler.compile(Structure(*PRIME))
    compiler.compile(Structure(REGEX, "a+"))
    # What clients do not write the grammar of needs no process.
    monkeypatch.setattr(trial.sys, "executable", os.devnull)
    compiler.compile(Structure(StructureKind.JSON_OBJECT))
    compiler.compile(Structure.of_choices(["a", "b"]))
    with pytest.raises(OSError, match="Permission denied"):
        compiler.compile(Structure(REGEX, "b+"))


@pytest.mark.parametrize("name", ["f", "f" * 64, "f" * 1000])
def test_a_trial_reads_on_through_text_that_is_bound_to_come(name: str) -> None:
    head = json.dumps(f'[{{"name": "{name}", "parameters": ')
    lark = f"start: {head} arguments\narguments: {json_rule(WIDE)}"
    with pytest.raises(ValueError, match=r"too complex: .*items"):
        Trials(SPECIAL)(grammar_of(Structure(GRAMMAR, lark)))


AORB = grammar_of(Structure(REGEX, "[ab]+"))


class Child(subprocess.Popen[bytes]):
    """Ends by itself in the way that it is told to, whatever it is asked."""

    program = ""

    def __init__(self, command: list[str], **options: Any) -> None:
        super().__init__([sys.executable, "-c", self.program], **options)


@pytest.mark.parametrize(
    ("program", "error", "problem"),
    [
        (f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})", CompilationFailed, "ended with -9"),
        (f"import os; os.kill(os.getpid(), {int(signal.SIGTERM)})", CompilationFailed, "ended with -15"),
        ("raise OSError('/secret/place')", CompilationFailed, "(?s)ended with 1: .*/secret/place"),
        ("import time; time.sleep(600)", CompilationFailed, "did not end within 0.01 s"),
        (f"import os; os.kill(os.getpid(), {int(signal.SIGABRT)})", ValueError, "more than 128 MiB"),
        (f"import os; os.kill(os.getpid(), {int(signal.SIGPROF)})", ValueError, "more than 2 s"),
        ("import sys; sys.exit(4)", ValueError, "more than 128 MiB"),
    ],
)
def test_what_ends_a_trial_from_outside_is_not_held_against_a_grammar(
    monkeypatch: pytest.MonkeyPatch, program: str, error: type[Exception], problem: str
) -> None:
    monkeypatch.setattr(Child, "program", program)
    monkeypatch.setattr(trial.subprocess, "Popen", Child)
    if "sleep" in program:
        monkeypatch.setattr(trial, "_PATIENCE_S", 0.01)
    with pytest.raises(error, match=problem):
        Trials(SPECIAL)(AORB)


def test_trials_end_when_they_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    class Endless(Child):
        program = "import time; time.sleep(600)"

        def communicate(self, *args: Any, **options: Any) -> Any:
            begun.set()
            return super().communicate(*args, **options)

    monkeypatch.setattr(trial.subprocess, "Popen", Endless)
    trials, told = Trials(SPECIAL), list[Exception]()

    def try_out() -> None:
        try:
            trials(AORB)
        except CompilationFailed as exc:
            told.append(exc)

    thread = threading.Thread(target=try_out)
    thread.start()
    assert begun.wait(30)
    trials.close()
    trials.close()
    thread.join(30)
    assert not thread.is_alive()
    assert "ended with -9" in str(told[0])
    with pytest.raises(CompilationFailed, match="no trials are made any more"):
        trials(AORB)

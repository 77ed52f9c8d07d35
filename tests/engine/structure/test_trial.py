"""Grammars that a client writes to stop a worker, or by mistake."""

import json
import os
from typing import Any

import pytest

from engine.structure import trial
from engine.structure.compiler import StructureCompiler
from engine.structure.grammar import grammar_of
from engine.structure.spec import Structure, StructureKind
from engine.structure.trial import try_out
from engine.structure.vocabulary import SpecialIds
from structured import BYTES, byte_tokenizer

SPECIAL = SpecialIds(1000, {0: "<eos>", 999: "<tool>"}, [0])
SCHEMA, REGEX, GRAMMAR = StructureKind.JSON_SCHEMA, StructureKind.REGEX, StructureKind.GRAMMAR


def schema(value: dict[str, Any]) -> tuple[StructureKind, str]:
    return SCHEMA, json.dumps(value)


def either_of_two(i: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "object", "required": [f"{letter}{i}"]} for letter in "ab"]}


PRIME = schema({"type": "integer", "multipleOf": 99_999_989})
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
        try_out(grammar_of(Structure(kind, text)), SPECIAL)


@pytest.mark.parametrize(("kind", "text"), HARMLESS.values(), ids=HARMLESS)
def test_what_the_library_stands_is_not_refused(kind: StructureKind, text: str) -> None:
    try_out(grammar_of(Structure(kind, text)), SPECIAL)


def test_processor_time_is_bounded() -> None:
    with pytest.raises(ValueError, match=r"it is too complex: it takes more than 0\.01 s to compile"):
        try_out(grammar_of(Structure(*PRIME)), SPECIAL, max_cpu_s=0.01)


def test_a_compiler_tries_what_clients_wrote_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = StructureCompiler(byte_tokenizer(BYTES), 257)
    with pytest.raises(ValueError, match="json_schema cannot be used: it is too complex"):
        compiler.compile(Structure(*PRIME))
    compiler.compile(Structure(REGEX, "a+"))
    # What clients do not write the grammar of needs no process.
    monkeypatch.setattr(trial.sys, "executable", os.devnull)
    compiler.compile(Structure(StructureKind.JSON_OBJECT))
    compiler.compile(Structure.of_choices(["a", "b"]))
    with pytest.raises(OSError, match="Permission denied"):
        compiler.compile(Structure(REGEX, "b+"))

"""What cannot be compiled is refused in a sentence; what can is compiled once."""

import contextlib
import json
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.structure import compiler as compiler_module
from engine.structure.compiler import StructureCompiler
from engine.structure.errors import CompilationFailed
from engine.structure.spec import MAX_TEXT_BYTES, Structure, StructureKind
from structured import BYTES, allowed_ids, byte_tokenizer

OBJECT, SCHEMA, REGEX, CHOICE, GRAMMAR = StructureKind


def new_compiler(trial: Callable[[str], None] = lambda grammar: None) -> StructureCompiler:
    return StructureCompiler(byte_tokenizer(BYTES), 257, trial=trial)


def deep(levels: int) -> str:
    return '{"items": ' * levels + "{}" + "}" * levels


BAD = [
    (SCHEMA, "{", "json_schema is not JSON: Expecting property name"),
    (SCHEMA, "", "json_schema is not JSON: Expecting value"),
    (SCHEMA, '{"const": NaN}', "json_schema is not JSON: NaN is no number of JSON"),
    (SCHEMA, "[1]", r"json_schema must be a JSON object, not \[1\]"),
    (SCHEMA, "true", "json_schema must be a JSON object, not true"),
    (SCHEMA, "[" * 30_000, "json_schema is nested too deeply"),
    (SCHEMA, deep(500), "json_schema cannot be used: recursion limit exceeded"),
    (SCHEMA, '{"type": "objekt"}', "json_schema cannot be used: Invalid type: objekt"),
    (SCHEMA, '{"type": 5}', "type must be a string or array of strings"),
    (SCHEMA, '{"properties": {"a": {"minLength": -1}}}', "Expected positive integer for 'minLength', got -1"),
    (SCHEMA, '{"$ref": "#/$defs/a"}', r"Pointer '/\$defs/a' does not exist"),
    (SCHEMA, '{"$ref": "https://example.org/schema"}', "Default retriever does not fetch resources"),
    (SCHEMA, '{"$ref": "#"}', "json_schema cannot be used: no text has this structure"),
    (SCHEMA, '{"enum": []}', "Unsatisfiable schema"),
    (SCHEMA, '{"type": "integer", "minimum": 3, "maximum": 2}', "Unsatisfiable schema: minimum .3. is greater"),
    (SCHEMA, '{"const": "\\ud800"}', "json_schema cannot be used: "),
    (REGEX, "[a", "regex cannot be used: unclosed character class"),
    (REGEX, "(a", "regex cannot be used: unclosed group"),
    (REGEX, r"(a)\1", "regex cannot be used: backreferences are not supported"),
    (REGEX, r"\bfoo", "lookarounds not supported yet"),
    (REGEX, "a\ud800", "regex has a lone surrogate at character 1"),
    (CHOICE, "[]", "choice must have at least one string"),
    (CHOICE, '["a", 1]', "choice must be an array of strings"),
    (CHOICE, '"a"', "choice must be an array of strings"),
    (CHOICE, "yes", "choice is not JSON"),
    (CHOICE, '["\\ud800"]', "choice has a lone surrogate"),
    (GRAMMAR, "", "grammar cannot be used: no start rule found"),
    (GRAMMAR, "start: nowhere", 'grammar cannot be used: unknown name: "nowhere"'),
    (GRAMMAR, 'start: "a', "grammar cannot be used: "),
    (GRAMMAR, "start: a\na: a", "grammar cannot be used: no text has this structure"),
    (GRAMMAR, "start: <|nobody|>", "unknown special token"),
    (GRAMMAR, "start: <[100000]>", "Token range end too large"),
]

UNSUPPORTED = [
    {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    {"not": {"type": "string"}},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"const": 1}},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"dependentRequired": {"a": ["b"]}},
    {"type": "object", "unevaluatedProperties": False},
]


@pytest.mark.parametrize(("kind", "text", "problem"), BAD)
def test_what_is_no_structure_is_refused_in_a_sentence(kind: StructureKind, text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        new_compiler().compile(Structure(kind, text))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("schema", UNSUPPORTED, ids=json.dumps)
@pytest.mark.parametrize("asks_for_leniency", [False, True])
def test_a_keyword_that_a_strict_schema_cannot_be_held_to_is_not_ignored(
    schema: dict[str, object], asks_for_leniency: bool
) -> None:
    nested = {"type": "object", "properties": {"inner": schema}}
    if asks_for_leniency:
        nested["x-guidance"] = {"lenient": True}
    with pytest.raises(ValueError, match=r"Unimplemented keys|oneOf constraints are not supported"):
        new_compiler().compile(Structure(SCHEMA, json.dumps(nested), strict=True))


def test_a_long_text_is_refused_unread() -> None:
    for kind in (SCHEMA, REGEX, CHOICE, GRAMMAR):
        with pytest.raises(ValueError, match=f"{kind.value} has {MAX_TEXT_BYTES + 1} bytes; at most {MAX_TEXT_BYTES}"):
            new_compiler().compile(Structure(kind, "é" * (MAX_TEXT_BYTES // 2) + "x"))
        with pytest.raises(ValueError, match=f"{kind.value} has 70000 characters; at most {MAX_TEXT_BYTES} bytes"):
            new_compiler().compile(Structure(kind, "x" * 70_000))


def test_a_text_that_is_too_long_is_not_kept() -> None:
    compiler = new_compiler()
    for ask in (compiler.compile, compiler.known):
        with pytest.raises(ValueError, match="at most"):
            ask(Structure(REGEX, "a" * (MAX_TEXT_BYTES + 1)))
    assert not compiler._outcomes


def test_a_refusal_that_is_repeated_takes_no_memory() -> None:
    compiler, text = new_compiler(), ["[", "a" * 20_000]

    def refused() -> None:
        own = Structure(REGEX, "".join(text))  # a copy, as each request has one
        with contextlib.suppress(ValueError):
            compiler.compile(own)

    refused()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(100):
            refused()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000  # each of the texts has 20,000


def test_a_long_choice_is_compiled() -> None:
    strings = [f"{i:x}" * 3 for i in range(4000)]
    structure = new_compiler().compile(Structure.of_choices(strings))
    assert allowed_ids(structure.matcher(), []) == sorted({ord(string[0]) + 1 for string in strings})


def test_a_model_that_cannot_end_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match="the model has no end-of-sequence token"):
        StructureCompiler(byte_tokenizer(BYTES, eos_token_ids=()), 257)
    with pytest.raises(ValueError, match="the model has no end-of-sequence token"):
        StructureCompiler(byte_tokenizer(BYTES, {256: "<eos>"}, [256]), 256)  # cut off


def test_a_structure_is_compiled_once() -> None:
    tried = list[str]()
    compiler = new_compiler(tried.append)
    first = compiler.compile(Structure(REGEX, "a+"))
    assert compiler.compile(Structure(REGEX, "a+")) is first
    assert compiler.compile(Structure(GRAMMAR, "start: /a+/")) is not first
    assert len(tried) == 2


def test_a_bad_structure_is_tried_once() -> None:
    tried = list[str]()
    compiler = new_compiler(tried.append)
    for _ in range(3):
        with pytest.raises(ValueError, match="unclosed"):
            compiler.compile(Structure(REGEX, "[a"))
    assert len(tried) == 1


@pytest.mark.parametrize(
    "problem", [OSError("no process"), CompilationFailed("no process"), AssertionError("no process")]
)
def test_a_trial_that_itself_fails_is_made_again(problem: Exception) -> None:
    answers = iter([problem, None])

    def trial(grammar: str) -> None:
        if (problem := next(answers)) is not None:
            raise problem

    compiler = new_compiler(trial)
    with pytest.raises(type(problem), match="no process"):
        compiler.compile(Structure(REGEX, "a"))
    assert compiler.known(Structure(REGEX, "a")) is None
    assert allowed_ids(compiler.compile(Structure(REGEX, "a")).matcher(), []) == [98]


def test_what_is_known_is_told_without_a_wait() -> None:
    compiler, good, bad = new_compiler(), Structure(REGEX, "a+"), Structure(REGEX, "[a")
    assert compiler.known(good) is None
    assert compiler.known(bad) is None
    compiled = compiler.compile(good)
    with pytest.raises(ValueError, match="unclosed"):
        compiler.compile(bad)
    assert compiler.known(good) is compiled
    with pytest.raises(ValueError, match="unclosed"):
        compiler.known(bad)


def test_what_was_not_asked_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_CACHED", 2)
    tried = list[str]()
    compiler = new_compiler(tried.append)
    for text in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(Structure(REGEX, text))
    assert len(tried) == 4  # b was the only one to be forgotten


def test_threads_share_what_one_of_them_compiles() -> None:
    tried, together = list[str](), threading.Barrier(8)
    compiler = new_compiler(tried.append)

    def compile_and_match(number: int) -> list[list[int]]:
        together.wait()
        matcher = compiler.compile(Structure(REGEX, "(ab|cd){50}")).matcher()
        return [allowed_ids(matcher, [98, 99] * n + [100] * (number % 2)) for n in range(40)]

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(compile_and_match, range(8)))
    assert len(tried) == 1
    assert answers[0][1:] == [[98, 100]] * 39
    assert answers[1][1:] == [[101]] * 39
    assert answers == [answers[0], answers[1]] * 4

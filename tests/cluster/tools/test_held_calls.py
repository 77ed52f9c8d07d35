"""Whatever a model writes within the grammar of a call: its parser finds calls, and arguments of the tools' schemas."""

import json
import random

import pytest

from cluster.tools.answer_structure import answer_structure
from cluster.tools.call_parser import call_parser
from cluster.tools.call_pieces import CallArguments, CallStart, Content
from cluster.tools.call_style import CallStyle
from cluster.tools.tool import Tool
from cluster.tools.tool_use import ToolMode, ToolUse
from engine.structure.compiler import StructureCompiler
from engine.structure.spec import Structure, StructureKind
from engine.tokenizer.tokenizer import Tokenizer
from gateway_api import embedded_tokenizer

# Nothing in them can be long, so that a text made of random tokens ends.
LIGHT = Tool(
    "light",
    {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "colour": {"enum": ["red", 'gr"een', "é\\"]}},
        "required": ["on", "colour"],
        "additionalProperties": False,
    },
)
PING = Tool("ping", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (LIGHT, PING)
ANSWER = Structure.of_choices(["no", '{"name": 1}'])
MOST_TOKENS = 400


def random_text(structure: Structure, tokenizer: Tokenizer, chance: random.Random) -> str:
    """A text of the structure, of tokens drawn from those that are allowed."""
    matcher = (
        StructureCompiler(tokenizer, tokenizer.vocab_size, trial=lambda grammar: None).compile(structure).matcher()
    )
    output: list[int] = []
    while len(output) < MOST_TOKENS:
        words = matcher.allowed(output)
        assert words is not None
        allowed = [32 * at + bit for at, word in enumerate(words) if word for bit in range(32) if int(word) >> bit & 1]
        ends = tokenizer.eos_token_ids.intersection(allowed)
        # A text may go on for ever: where it can end, it mostly does.
        token_id = chance.choice(sorted(ends)) if ends and chance.random() < 0.7 else chance.choice(allowed)
        if token_id in tokenizer.eos_token_ids:
            return tokenizer.decode(output, skip_special_tokens=False)
        output.append(token_id)
    raise AssertionError(f"no end after {MOST_TOKENS} tokens")


def check(use: ToolUse, style: CallStyle, text: str) -> int:
    """Parses the text; how many calls it has."""
    parser = call_parser(use, style)
    assert parser is not None
    pieces = parser.push(text) + parser.flush()
    names = [piece.name for piece in pieces if isinstance(piece, CallStart)]
    arguments = ["" for _ in names]
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.index] += piece.text
    for name, written in zip(names, arguments, strict=True):
        values = json.loads(written)
        if name == "ping":
            assert values == {}
        else:
            assert name == "light"
            assert isinstance(values["on"], bool)
            assert values["colour"] in ("red", 'gr"een', "é\\")
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    assert content == ("" if names else text)
    return len(names)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "use",
    [
        ToolUse(ToolMode.REQUIRED, TOOLS),
        ToolUse(ToolMode.REQUIRED, TOOLS, is_parallel=False),
        ToolUse(ToolMode.NAMED, TOOLS, LIGHT, is_parallel=False),
    ],
    ids=["required", "required, one", "named"],
)
def test_demanded_call_is_always_a_call(use: ToolUse, seed: int) -> None:
    tokenizer = embedded_tokenizer()
    structure = answer_structure(use, None, CallStyle.HERMES, tokenizer)
    assert structure is not None
    num_calls = check(use, CallStyle.HERMES, random_text(structure, tokenizer, random.Random(seed)))
    assert num_calls >= 1
    assert num_calls == 1 or use.is_parallel


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("style", CallStyle)
def test_text_of_calls_or_an_answer_is_one_or_the_other(style: CallStyle, seed: int) -> None:
    tokenizer = embedded_tokenizer()
    use = ToolUse(ToolMode.AUTO, TOOLS)
    structure = answer_structure(use, ANSWER, style, tokenizer)
    assert structure is not None
    assert structure.kind is StructureKind.GRAMMAR
    text = random_text(structure, tokenizer, random.Random(seed))
    assert check(use, style, text) >= 1 or text in ANSWER.choices()

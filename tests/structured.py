"""For tests of structured output: tokenizers of a few tokens, and texts written at random under a mask."""

import random
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Encoder

from engine.executor import TokenMatcher
from engine.structure.compiler import StructureCompiler
from engine.structure.matcher import CompiledStructure
from engine.structure.spec import Structure, StructureKind
from engine.tokenizer.token_bytes import byte_level_bytes
from engine.tokenizer.tokenizer import SpecialTokens, Tokenizer

_SPELLED = {byte_level_bytes(c)[0]: c for c in map(chr, range(0x21, 0x144)) if len(byte_level_bytes(c)) == 1}

BYTES = [bytes((byte,)) for byte in range(256)]


def byte_tokenizer(
    tokens: Sequence[bytes], special: Mapping[int, str] | None = None, eos_token_ids: Collection[int] = (0,)
) -> Tokenizer:
    """One whose tokens are `special`, by id, and at the ids between and behind these, in order, `tokens`."""
    special = {0: "<eos>"} if special is None else special
    vocabulary = {name: token_id for token_id, name in special.items()}
    free = (token_id for token_id in range(len(tokens) + len(special)) if token_id not in special)
    for token in tokens:
        vocabulary["".join(_SPELLED[byte] for byte in token)] = next(free)
    encoder = Encoder(models.BPE(vocab=vocabulary, merges=[]))
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special.values()])
    return Tokenizer(encoder, SpecialTokens(eos_token_ids=frozenset(eos_token_ids)))


def compiled(kind: StructureKind, text: str, tokenizer: Tokenizer, vocab_size: int | None = None) -> CompiledStructure:
    """Without a trial in another process."""
    compiler = StructureCompiler(tokenizer, vocab_size or tokenizer.vocab_size, trial=lambda grammar: None)
    return compiler.compile(Structure(kind, text))


def allowed_ids(matcher: TokenMatcher, output_token_ids: Sequence[int]) -> list[int]:
    words = matcher.allowed(output_token_ids)
    assert words.dtype == np.uint32
    return [32 * place + bit for place, word in enumerate(words.tolist()) for bit in range(32) if word >> bit & 1]


def written(
    matcher: TokenMatcher, tokenizer: Tokenizer, seed: int, max_tokens: int, signs: bytes = b'"}]'
) -> tuple[list[int], bool]:
    """Tokens at random among those allowed, and whether the text has ended.

    Args:
        signs: every other time one of these bytes is taken, or the end, if it is allowed; else few texts would end.
    """
    choice, output = random.Random(seed), list[int]()
    ends = tokenizer.eos_token_ids.union(
        i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) in {bytes((sign,)) for sign in signs}
    )
    while len(output) < max_tokens:
        ids = allowed_ids(matcher, output)
        assert ids
        ending = [token_id for token_id in ids if token_id in ends] if choice.random() < 0.5 else []
        output.append(choice.choice(ending or ids))
        if output[-1] in tokenizer.eos_token_ids:
            return output, True
    return output, False

"""One sequence, held to its structure."""

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from engine.structure.spec import Structure
from engine.structure.start import shortened

logger = logging.getLogger(__name__)

Mask = npt.NDArray[np.uint32]

_LONGEST_LOGGED = 200


class CompiledStructure:
    """A structure that texts can be held to. Immutable, but for what it has complained of; threads may share it.

    Args:
        start: the state in which a text begins; not changed.
        vocab_size: tokens in a mask.
        eos_token_ids: any of them ends a text.
    """

    def __init__(self, structure: Structure, start: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.structure = structure
        self.eos_token_ids = frozenset(eos_token_ids)
        self._start = start
        self.only_end = np.zeros(-(-vocab_size // 32), np.uint32)  # a mask
        for token_id in eos_token_ids:
            self.only_end[token_id // 32] |= np.uint32(1 << token_id % 32)
        self.only_end.setflags(write=False)
        self._has_complained = False

    def matcher(self) -> "SequenceMatcher":
        """For one more sequence."""
        return SequenceMatcher(self)

    def start(self) -> LLMatcher:
        """A copy of the state in which a text begins."""
        return self._start.deep_copy()

    def complain(self, problem: str) -> None:
        """Says, once, that a text was given up."""
        if not self._has_complained:
            self._has_complained = True
            kind, text = self.structure.kind.value, self.structure.text[:_LONGEST_LOGGED]
            logger.warning("a text held to %s %s was ended early: %s", kind, text, problem)


class SequenceMatcher:
    """A `TokenMatcher`, which follows one text; used by one thread at a time.

    Its answers are a function of the tokens alone: what it remembers only spares it reading them again.

    It may find out in the middle that it cannot go on: that the structure asks for more work than the library will do
    for one token, or that no token of the vocabulary goes on with this text, or that the tokens were not allowed, as of
    a request that another version of the structure began. Then it allows the end and nothing else: whatever followed
    might break the structure. Whoever samples that end is told by `has_given_up` that it is none of the structure's.
    """

    def __init__(self, compiled: CompiledStructure) -> None:
        self.has_given_up = False
        self._compiled = compiled
        self._consumed: list[int] = []
        self._mask: Mask | None = None  # after `_consumed`
        self._text: LLMatcher | None = compiled.start()  # None: it is over, or given up

    def allowed(self, output_token_ids: Sequence[int]) -> Mask:
        """Which tokens may follow these; see `TokenMatcher`. Where the text may end, the end-of-sequence ids may.

        Returns:
            [ceil(vocab_size / 32)], not to be written to.
        """
        num_known = len(self._consumed)
        if list(output_token_ids[:num_known]) != self._consumed:  # another text, or less of this one
            self._restart()
            num_known = 0
        new = list(output_token_ids[num_known:])
        if new:
            self._consumed += new
            self._mask = None
            if self._text is not None:
                self._follow(self._text, new)
        if self._mask is None:
            self._mask = self._next_mask()
        return self._mask

    def _restart(self) -> None:
        self._consumed, self._mask, self._text = [], None, self._compiled.start()
        self.has_given_up = False

    def _give_up(self, text: LLMatcher) -> None:
        self._compiled.complain(shortened(text.get_error()))
        self._text = None
        self.has_given_up = True

    def _follow(self, text: LLMatcher, new: list[int]) -> None:
        has_ended = any(token_id in self._compiled.eos_token_ids for token_id in new)
        if has_ended:
            # Generation may go on behind it, while there are fewer tokens than `min_tokens`.
            self._text = None
        elif not text.consume_tokens(new):
            self._give_up(text)

    def _next_mask(self) -> Mask:
        if self._text is None:
            return self._compiled.only_end
        # The library may put a word behind the last one.
        mask = np.frombuffer(self._text.compute_bitmask(), np.uint32)[: len(self._compiled.only_end)]
        if self._text.is_error() or not mask.any():
            self._give_up(self._text)
            return self._compiled.only_end
        return mask

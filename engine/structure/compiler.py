"""From structures to what texts can be held to."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from engine.structure.grammar import grammar_of
from engine.structure.matcher import CompiledStructure
from engine.structure.spec import Structure, StructureKind
from engine.structure.start import start_of
from engine.structure.trial import try_out
from engine.structure.vocabulary import SpecialIds, ll_tokenizer
from engine.tokenizer.tokenizer import Tokenizer

_MAX_CACHED = 64

# Of these the library is known to stand whatever a client writes.
_HARMLESS = (StructureKind.JSON_OBJECT, StructureKind.CHOICE)


class StructureCompiler:
    """Compiles for one model; keeps what it has compiled last, good or bad. Threads may share it.

    Args:
        tokenizer: the model's.
        vocab_size: logits of the model; ids that the tokenizer has no token for are never allowed.
        trial: raises a ValueError if a grammar must not be compiled in this process. Absent: it is tried in another.

    Raises:
        ValueError: the model has no token that ends a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, trial: Callable[[str], None] | None = None) -> None:
        self._special = SpecialIds.of(tokenizer, vocab_size)
        self._tokenizer = ll_tokenizer(tokenizer, self._special)
        self._trial = trial or partial(try_out, special=self._special)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Structure, Future[CompiledStructure]] = OrderedDict()

    def compile(self, structure: Structure) -> CompiledStructure:
        """Blocks, the first time that it sees a structure: seconds at worst.

        Raises:
            ValueError: it is no good; the message says what is wrong with it.
        """
        with self._lock:
            future = self._compiled.get(structure)
            is_new = future is None
            if future is None:
                future = self._compiled[structure] = Future()
                if len(self._compiled) > _MAX_CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(structure)
        if is_new:
            self._fill(future, structure)
        try:
            return future.result()
        except ValueError as exc:
            raise ValueError(str(exc)) from exc  # each caller its own

    def _fill(self, future: Future[CompiledStructure], structure: Structure) -> None:
        try:
            future.set_result(self._new(structure))
        except BaseException as exc:
            future.set_exception(exc)
            if not isinstance(exc, ValueError):  # not the structure's fault: the next one tries again
                with self._lock:
                    self._compiled.pop(structure, None)

    def _new(self, structure: Structure) -> CompiledStructure:
        grammar = grammar_of(structure)
        try:
            if structure.kind not in _HARMLESS:
                self._trial(grammar)
            start = start_of(grammar, self._tokenizer)
        except ValueError as exc:
            raise ValueError(f"{structure.kind.value} cannot be used: {exc}") from exc
        return CompiledStructure(structure, start, self._special.vocab_size, self._special.eos_token_ids)

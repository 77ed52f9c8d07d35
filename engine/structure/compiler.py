"""From structures to what texts can be held to."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from engine.structure.grammar import grammar_of
from engine.structure.matcher import CompiledStructure
from engine.structure.spec import Structure, StructureKind
from engine.structure.start import start_of
from engine.structure.trial import Trials
from engine.structure.vocabulary import SpecialIds, ll_tokenizer
from engine.tokenizer.tokenizer import Tokenizer

_MAX_CACHED = 64

# Of these the library is known to stand whatever a client writes; they take milliseconds.
HARMLESS = (StructureKind.JSON_OBJECT, StructureKind.CHOICE)


class StructureCompiler:
    """Compiles for one model; keeps what it has compiled last, good or bad. Threads may share it.

    Args:
        tokenizer: the model's.
        vocab_size: logits of the model; ids that the tokenizer has no token for are never allowed.
        trial: raises a ValueError if a grammar must not be compiled in this process, another error if that could not
            be found out. Absent: it is tried in another process.

    Raises:
        ValueError: the model has no token that ends a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, trial: Callable[[str], None] | None = None) -> None:
        self._special = SpecialIds.of(tokenizer, vocab_size)
        self._tokenizer = ll_tokenizer(tokenizer, self._special)
        self._trials = Trials(self._special)
        self._trial = trial or self._trials
        self._lock = threading.Lock()
        # What is wrong with a bad one is kept as a text: an error grows with each time that it is raised.
        self._outcomes: OrderedDict[Structure, Future[CompiledStructure | str]] = OrderedDict()

    def known(self, structure: Structure) -> CompiledStructure | None:
        """What `compile` would return at once; None: it would block. Never blocks.

        Raises:
            ValueError: it is no good.
        """
        structure.check_text()
        with self._lock:
            future = self._outcomes.get(structure)
            if future is None or not future.done():
                return None
            self._outcomes.move_to_end(structure)
        return _compiled(future)

    def compile(self, structure: Structure) -> CompiledStructure:
        """Blocks, the first time that it sees a structure: seconds at worst.

        Raises:
            ValueError: it is no good; the message says what is wrong with it.
            CompilationFailed: that could not be found out. As every other error, it is nobody's fault: the next call
                tries again.
        """
        structure.check_text()  # first, or the cache would hold texts of any length
        with self._lock:
            future = self._outcomes.get(structure)
            is_new = future is None
            if future is None:
                future = self._outcomes[structure] = Future()
                if len(self._outcomes) > _MAX_CACHED:
                    self._outcomes.popitem(last=False)
            self._outcomes.move_to_end(structure)
        if is_new:
            self._fill(future, structure)
        return _compiled(future)

    def close(self) -> None:
        """Ends the trials that run, and has no more made: what still compiles fails. Idempotent."""
        self._trials.close()

    def _fill(self, future: Future[CompiledStructure | str], structure: Structure) -> None:
        try:
            future.set_result(self._new(structure))
        except ValueError as exc:
            future.set_result(str(exc))
        except BaseException as exc:
            with self._lock:
                if self._outcomes.get(structure) is future:
                    del self._outcomes[structure]
            future.set_exception(exc)

    def _new(self, structure: Structure) -> CompiledStructure:
        grammar = grammar_of(structure)
        try:
            if structure.kind not in HARMLESS:
                self._trial(grammar)
            start = start_of(grammar, self._tokenizer)
        except ValueError as exc:
            raise ValueError(f"{structure.kind.value} cannot be used: {exc}") from exc
        return CompiledStructure(structure, start, self._special.vocab_size, self._special.eos_token_ids)


def _compiled(future: Future[CompiledStructure | str]) -> CompiledStructure:
    outcome = future.result()
    if isinstance(outcome, str):
        raise ValueError(outcome)
    return outcome

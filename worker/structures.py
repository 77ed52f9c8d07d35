"""From a request's structure to the matchers of its sequences, off the event loop.

The first request with a structure loads the model's tokenizer, and the first with each structure has it compiled, which
takes a tenth of a second at least: both in threads of this module. A worker whose clients never ask for a structure
loads and starts nothing. What is known already is told without a thread; all who want the same structure wait for one
compilation of it; and what is compiled in milliseconds has a thread of its own, which nothing hostile holds up.

A worker with the hash executor has no model, but a gateway before it has a tokenizer, that of `WorkerConfig.model`. The
same is loaded here and cut to the executor's vocabulary: byte-level vocabularies begin with the single bytes, so what
is left still writes every text, and what the gateway reads is what was held to the structure.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from engine.executor import TokenMatcher
from engine.model.errors import ModelLoadError
from engine.structure.compiler import HARMLESS, StructureCompiler
from engine.structure.matcher import CompiledStructure
from engine.structure.spec import Structure
from kvtransfer.errors import Code

logger = logging.getLogger(__name__)

# So many structures are compiled at once, beside one that is known to be quick; each may take a core for seconds.
_NUM_THREADS = 2


def model_compiler(model: str, vocab_size: int) -> StructureCompiler:
    """Of the tokenizer of `model` (`WorkerConfig.model`); takes about a second.

    Args:
        vocab_size: of the executor.

    Raises:
        FileNotFoundError, ModelLoadError, ValueError: there is no such model, or no tokenizer in it that can be used.
    """
    from engine.model.locate import resolve_model
    from engine.tokenizer.tokenizer import Tokenizer

    return StructureCompiler(Tokenizer.load(resolve_model(model)), vocab_size)


@dataclass(frozen=True, slots=True)
class _Refusal:
    code: Code
    message: str  # for the client


_Outcome = CompiledStructure | _Refusal


class Preparation:
    """A request's matchers on their way."""

    def __init__(
        self,
        num_matchers: int,
        ready: Callable[[list[TokenMatcher]], None],
        refused: Callable[[Code, str], None],
        over: Callable[["Preparation"], None],
    ) -> None:
        self._num_matchers = num_matchers
        self._ready = ready
        self._refused = refused
        self._over = over
        self._is_over = False

    def cancel(self) -> None:
        """Neither callback is called any more, and what nobody waits for is not begun; idempotent, at any time."""
        if not self._is_over:
            self._is_over = True
            self._over(self)

    def tell(self, outcome: _Outcome) -> None:
        """Calls one of the two, if neither was and it was not cancelled."""
        if self._is_over:
            return
        self.cancel()
        if isinstance(outcome, _Refusal):
            self._refused(outcome.code, outcome.message)
        else:
            self._ready([outcome.matcher() for _ in range(self._num_matchers)])  # microseconds each


@dataclass(slots=True, eq=False)
class _Compilation:
    """Of one structure, for all who wait for it."""

    future: Future[_Outcome]
    waiting: list[Preparation] = field(default_factory=list)


class Structures:
    """Hands out matchers, one for each sequence. Lives on the event loop.

    A role goes through it between a request's arrival and its engine, if `params.structure` is not None, and only then:

        preparation = structures.prepare(params.structure, len(choices), ready, refused)

    `ready` gets one matcher for each choice (or the one sequence), to be passed on in `Request.matcher`, and goes on as
    for other requests (`engine.add_request`). `refused` gets a status and a sentence for the client: INVALID_ARGUMENT
    if the structure is no good, UNAVAILABLE if that could not be found out here: another worker may. One of the two is
    called, once, on the loop, and never before `prepare` has returned, in whatever order structures are done. A request
    that is dropped meanwhile (abort, end of its session, its deadline) calls `preparation.cancel()`; or, if it does not
    keep it, finds in `ready` that the request is not in its books any more, and leaves it at that: matchers hold
    nothing that must be given back. The engine knows nothing of a request before `ready`, so there is nothing to abort
    in it.

    Resumed tokens, a first token that a prefill worker sampled, preemption: nothing is to be done, a matcher reads what
    its sequence has from `SamplingInput.output_token_ids`.

    Args:
        new_compiler: blocks; called in a thread, by the first request, and again by the next if it raises.
        changed: called on the loop when `num_preparing` has changed.
    """

    def __init__(
        self, new_compiler: Callable[[], StructureCompiler], changed: Callable[[], None] = lambda: None
    ) -> None:
        self.num_preparing = 0  # that have been told nothing yet
        self._new_compiler = new_compiler
        self._changed = changed
        self._compiler: StructureCompiler | None = None
        self._is_closed = False
        self._loading = threading.Lock()
        self._compilations: dict[Structure, _Compilation] = {}
        # They start no thread by themselves.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="structures")
        self._quick_thread = ThreadPoolExecutor(1, thread_name_prefix="quick-structures")

    def prepare(
        self,
        structure: Structure,
        num_matchers: int,
        ready: Callable[[list[TokenMatcher]], None],
        refused: Callable[[Code, str], None],
    ) -> Preparation:
        """See the class. Must be called on the loop; not after `close`."""
        known = self._known(structure)
        compilation = None if known is not None else self._compilation_of(structure)
        preparation = Preparation(num_matchers, ready, refused, partial(self._over, structure, compilation))
        if compilation is not None:
            compilation.waiting.append(preparation)
        else:
            assert known is not None
            asyncio.get_running_loop().call_soon(preparation.tell, known)
        self._count(1)
        return preparation

    def close(self) -> None:
        """Nothing more is begun, and trials that run are ended: who waits for one is refused. Does not wait for that.

        Neither callback is called for what was not begun. Idempotent.
        """
        self._is_closed = True
        for threads in (self._threads, self._quick_thread):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

    # --- on the loop

    def _known(self, structure: Structure) -> _Outcome | None:
        if self._compiler is None:
            return None
        try:
            return self._compiler.known(structure)
        except ValueError as exc:
            return _Refusal(Code.INVALID_ARGUMENT, str(exc))

    def _compilation_of(self, structure: Structure) -> _Compilation:
        compilation = self._compilations.get(structure)
        if compilation is None:
            threads = self._quick_thread if structure.kind in HARMLESS else self._threads
            compilation = _Compilation(threads.submit(self._compiled, structure))
            self._compilations[structure] = compilation
            done = partial(self._done, structure, compilation)
            asyncio.wrap_future(compilation.future).add_done_callback(done)
        return compilation

    def _done(self, structure: Structure, compilation: _Compilation, future: "asyncio.Future[_Outcome]") -> None:
        if future.cancelled():
            return  # nobody waits, or all is over
        if self._compilations.get(structure) is compilation:
            del self._compilations[structure]
        for preparation in tuple(compilation.waiting):
            # Each by itself: what one of them does is nothing to the others.
            asyncio.get_running_loop().call_soon(preparation.tell, future.result())

    def _over(self, structure: Structure, compilation: _Compilation | None, preparation: Preparation) -> None:
        self._count(-1)
        if compilation is None:
            return
        compilation.waiting.remove(preparation)
        # Itself: its image on the loop would tell it a turn later, when it may have begun.
        if not compilation.waiting and compilation.future.cancel():
            del self._compilations[structure]

    def _count(self, change: int) -> None:
        self.num_preparing += change
        self._changed()

    # --- in a thread

    def _compiled(self, structure: Structure) -> _Outcome:
        try:
            return self._loaded().compile(structure)
        except ValueError as exc:
            return _Refusal(Code.INVALID_ARGUMENT, str(exc))
        except BaseException:
            # Whatever it is, a panic of the library among them: it is not the client's fault, and may name what is none
            # of its business.
            logger.exception("a structure could not be compiled")
            return _Refusal(Code.UNAVAILABLE, "the structure could not be compiled here: the worker's log says why")

    def _loaded(self) -> StructureCompiler:
        with self._loading:
            if self._compiler is None:
                try:
                    self._compiler = self._new_compiler()
                except ModelLoadError as exc:
                    raise RuntimeError("the model's tokenizer could not be loaded") from exc
                except ValueError as exc:
                    raise ValueError(f"this model cannot be held to structures: {exc}") from exc
                if self._is_closed:
                    self._compiler.close()
            return self._compiler

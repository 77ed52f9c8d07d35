"""From a request's structure to the matchers of its sequences, off the event loop.

The first request with a structure loads the model's tokenizer, and the first with each structure has it compiled, which
takes a tenth of a second at least: both in threads of this module. A worker whose clients never ask for a structure
loads and starts nothing.

A worker with the hash executor has no model, but a gateway before it has a tokenizer, that of `WorkerConfig.model`. The
same is loaded here and cut to the executor's vocabulary: byte-level vocabularies begin with the single bytes, so what
is left still writes every text, and what the gateway reads is what was held to the structure.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from engine.executor import TokenMatcher
from engine.structure.compiler import StructureCompiler
from engine.structure.spec import Structure

logger = logging.getLogger(__name__)

# So many structures are compiled at once; each may take a core for seconds.
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


class Preparation:
    """A request's matchers on their way."""

    def __init__(
        self,
        job: Future[list[TokenMatcher]],
        ready: Callable[[list[TokenMatcher]], None],
        refused: Callable[[str], None],
    ) -> None:
        self._job = job
        self._ready = ready
        self._refused = refused
        self._is_cancelled = False
        asyncio.wrap_future(job).add_done_callback(self._done)

    def cancel(self) -> None:
        """Neither callback is called any more, and what has not begun is not done; idempotent, at any time."""
        self._is_cancelled = True
        self._job.cancel()  # itself: its image on the loop would tell it a turn later, when it may have begun

    def _done(self, future: "asyncio.Future[list[TokenMatcher]]") -> None:
        problem = None if future.cancelled() else future.exception()
        if future.cancelled() or self._is_cancelled:
            return
        if problem is None:
            self._ready(future.result())
        else:
            self._refused(str(problem))


class Structures:
    """Hands out matchers, one for each sequence. Lives on the event loop.

    A role goes through it between a request's arrival and its engine, if `params.structure` is not None, and only then:

        preparation = structures.prepare(params.structure, len(choices), ready, refused)

    `ready` gets one matcher for each choice (or the one sequence), to be passed on in `Request.matcher`, and goes on as
    for other requests (`engine.add_request`). `refused` gets a sentence for the client: INVALID_ARGUMENT. One of the
    two is called, once, on the loop, and never before `prepare` has returned, in whatever order structures are done. A
    request that is dropped meanwhile (abort, end of its session, its deadline) calls `preparation.cancel()`; or, if it
    does not keep it, finds in `ready` that the request is not in its books any more, and leaves it at that: matchers
    hold nothing that must be given back. The engine knows nothing of a request before `ready`, so there is nothing to
    abort in it.

    Resumed tokens, a first token that a prefill worker sampled, preemption: nothing is to be done, a matcher reads what
    its sequence has from `SamplingInput.output_token_ids`.

    Args:
        new_compiler: blocks; called in a thread, by the first request, and again by the next if it raises.
    """

    def __init__(self, new_compiler: Callable[[], StructureCompiler]) -> None:
        self._new_compiler = new_compiler
        self._compiler: StructureCompiler | None = None
        self._loading = threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="structures")  # starts none by itself

    def prepare(
        self,
        structure: Structure,
        num_matchers: int,
        ready: Callable[[list[TokenMatcher]], None],
        refused: Callable[[str], None],
    ) -> Preparation:
        """See the class. Must be called on the loop; not after `close`."""
        return Preparation(self._threads.submit(self._matchers, structure, num_matchers), ready, refused)

    def close(self) -> None:
        """Nothing more is begun; does not wait for what has. Neither callback is called for what was not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _matchers(self, structure: Structure, num_matchers: int) -> list[TokenMatcher]:
        try:
            compiled = self._loaded().compile(structure)
            return [compiled.matcher() for _ in range(num_matchers)]
        except ValueError:
            raise
        except Exception as exc:
            # Whatever it is: one request is refused, with a word in the log of what it was.
            logger.exception("a structure could not be compiled")
            raise ValueError(f"the worker could not compile the structure: {type(exc).__name__}: {exc}") from exc

    def _loaded(self) -> StructureCompiler:
        with self._loading:
            if self._compiler is None:
                try:
                    self._compiler = self._new_compiler()
                except (OSError, ValueError) as exc:
                    raise ValueError(f"this model cannot be held to structures: {exc}") from exc
            return self._compiler

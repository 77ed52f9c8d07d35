"""A grammar is tried in a process of its own before this one touches it.

The library bounds what it does by counting, and does not count all: some grammars keep it for ever, inside one call,
which no thread can be called back from, and others take all memory. A few lines of a schema are enough. So a child
process goes first: it compiles the grammar over single bytes, and writes random texts of it. It runs under limits that
the kernel keeps, of processor time, so that a busy machine refuses no more than an idle one, and of memory.

The child is a new one each time: it costs a tenth of a second, once a structure, and has no state to be spoilt. It
gives way to the worker's own threads where processors are few.

Only what a grammar does in any trial is held against it: it is refused by the library, or comes to a limit, or brings
the library down. A child that cannot be started, is killed from outside or does not get round to it says nothing.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llguidance import LLMatcher

from engine.structure.errors import CompilationFailed
from engine.structure.start import is_dead_end, shortened, start_of
from engine.structure.vocabulary import SpecialIds, byte_tokenizer

MAX_CPU_S = 2.0
MAX_MEMORY_BYTES = 128 << 20  # beyond what Python and the library have when they have just started

_NUM_TEXTS = 6
_NUM_CHOSEN_BYTES = 64  # of a text: those that the grammar leaves a choice of
_NUM_BYTES = 2048  # with those that it does not, as the head of a call
_SIGNS = frozenset(b'"{}[],:')  # taken every other time, or random texts would never see the end of a string

# Exit statuses.
_REFUSED = 3  # what was wrong is written to standard output
_NO_MEMORY = 4
# How the library ends a process: where it gets no memory, where its stack is full, where it finds itself broken.
_BROUGHT_DOWN = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGILL)
# Far beyond the processor time: for a machine that does not get round to it.
_PATIENCE_S = 60.0
_NICENESS = 5
_ROOT = Path(__file__).resolve().parents[2]


class Trials:
    """Tries grammars out, each in a child; threads may share it.

    Args:
        special: of the model.
        max_cpu_s: processor time of one.
    """

    def __init__(self, special: SpecialIds, *, max_cpu_s: float = MAX_CPU_S) -> None:
        self._special = special
        self._max_cpu_s = max_cpu_s
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def __call__(self, grammar: str) -> None:
        """Returns if `grammar` can be compiled and followed, with little time and memory.

        Blocks for a tenth of a second at least, and for `max_cpu_s` of processor time and a little more at most.

        Raises:
            ValueError: it cannot; the message says why.
            CompilationFailed: that could not be found out; the message is for the log.
            OSError: there is no process to be had.
        """
        special = self._special
        names = {str(token_id): name for token_id, name in special.names.items()}
        question = json.dumps([grammar, special.vocab_size, names, list(special.eos_token_ids), self._max_cpu_s])
        with self._child() as child:
            try:
                answer, complaint = child.communicate(question.encode(), timeout=_PATIENCE_S)
            except subprocess.TimeoutExpired as exc:
                raise CompilationFailed(f"a trial did not end within {_PATIENCE_S:g} s") from exc
        status = child.returncode
        if status == _REFUSED:
            raise ValueError(answer.decode(errors="replace"))
        if status == -signal.SIGPROF:
            raise ValueError(f"it is too complex: it takes more than {self._max_cpu_s:g} s to compile")
        if status == _NO_MEMORY or status in _BROUGHT_DOWN:
            raise ValueError(f"it is too complex: it takes more than {MAX_MEMORY_BYTES >> 20} MiB to compile")
        if status != 0:
            raise CompilationFailed(f"a trial ended with {status}: {complaint.decode(errors='replace')}")

    def close(self) -> None:
        """Ends those that run, which then fail, and lets none begin; idempotent."""
        with self._lock:
            self._is_closed = True
            for child in self._children:
                child.kill()

    @contextmanager
    def _child(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Has ended, whatever happened."""
        command = [sys.executable, "-m", "engine.structure.trial"]
        pipe = subprocess.PIPE
        with self._lock:
            if self._is_closed:
                raise CompilationFailed("no trials are made any more")
            child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=_ROOT)
            self._children.add(child)
        with child:
            try:
                yield child
            finally:
                child.kill()  # nothing, if it has been waited for
                with self._lock:
                    self._children.discard(child)


def write_texts(start: LLMatcher, first_byte_id: int) -> None:
    """Random texts, or their beginnings.

    Args:
        first_byte_id: the token of the byte 0; the others follow.

    Raises:
        ValueError: the library gives one up.
    """
    for number in range(_NUM_TEXTS):
        matcher, choice, num_chosen = start.deep_copy(), random.Random(number), 0
        for _ in range(_NUM_BYTES):
            mask = int.from_bytes(matcher.compute_bitmask(), "little") >> first_byte_id
            allowed = [byte for byte in range(256) if mask >> byte & 1]
            if not allowed or matcher.is_error() or num_chosen == _NUM_CHOSEN_BYTES:
                break
            num_chosen += len(allowed) > 1
            signs = [byte for byte in allowed if byte in _SIGNS] if choice.random() < 0.5 else []
            matcher.consume_token(first_byte_id + choice.choice(signs or allowed))
        if matcher.is_error() and not is_dead_end(matcher):
            raise ValueError(f"it is too complex: {shortened(matcher.get_error())}")


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> int:
    os.nice(_NICENESS)
    grammar, vocab_size, names, eos_token_ids, max_cpu_s = json.loads(sys.stdin.buffer.read())
    special = SpecialIds(vocab_size, {int(token_id): name for token_id, name in names.items()}, eos_token_ids)
    tokenizer = byte_tokenizer(special)
    _limit_memory()
    # Its signal ends the process, whatever the library is at.
    signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
    try:
        write_texts(start_of(grammar, tokenizer), vocab_size)
    except ValueError as exc:
        sys.stdout.buffer.write(str(exc).encode(errors="replace"))
        return _REFUSED
    except MemoryError:
        return _NO_MEMORY
    return 0


if __name__ == "__main__":
    sys.exit(main())

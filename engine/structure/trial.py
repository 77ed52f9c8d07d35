"""A grammar is tried in a process of its own before this one touches it.

The library bounds what it does by counting, and does not count all: some grammars keep it for ever, inside one call,
which no thread can be called back from, and others take all memory. A few lines of a schema are enough. So a child
process goes first: it compiles the grammar over single bytes, and writes random texts of it. It runs under limits that
the kernel keeps, of processor time, so that a busy machine refuses no more than an idle one, and of memory.

The child is a new one each time: it costs a tenth of a second, once a structure, and has no state to be spoilt.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

from llguidance import LLMatcher

from engine.structure.start import is_dead_end, shortened, start_of
from engine.structure.vocabulary import SpecialIds, byte_tokenizer

MAX_CPU_S = 2.0
MAX_MEMORY_BYTES = 128 << 20  # beyond what Python and the library have when they have just started

_NUM_TEXTS = 6
_TEXT_BYTES = 64
_SIGNS = frozenset(b'"{}[],:')  # taken every other time, or random texts would never see the end of a string

# Exit statuses.
_REFUSED = 3  # what was wrong is written to standard output
_NO_MEMORY = 4
# Far beyond the processor time: for a machine that does not get round to it.
_PATIENCE_S = 60.0
_ROOT = Path(__file__).resolve().parents[2]


def try_out(grammar: str, special: SpecialIds, *, max_cpu_s: float = MAX_CPU_S) -> None:
    """Returns if `grammar` can be compiled and followed, with little time and memory.

    Blocks for a tenth of a second at least, and for `max_cpu_s` of processor time and a little more at most.

    Raises:
        ValueError: it cannot; the message says why.
    """
    names = {str(token_id): name for token_id, name in special.names.items()}
    question = json.dumps([grammar, special.vocab_size, names, list(special.eos_token_ids), max_cpu_s])
    command = [sys.executable, "-m", "engine.structure.trial"]
    try:
        child = subprocess.run(
            command, input=question.encode(), capture_output=True, cwd=_ROOT, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise ValueError("it could not be tried out in time") from exc
    if child.returncode == _REFUSED:
        raise ValueError(child.stdout.decode())
    if child.returncode == -signal.SIGPROF:
        raise ValueError(f"it is too complex: it takes more than {max_cpu_s:g} s to compile")
    if child.returncode == _NO_MEMORY or child.returncode < 0:  # the library ends the process where it gets none
        raise ValueError(f"it is too complex: it takes more than {MAX_MEMORY_BYTES >> 20} MiB to compile")
    assert child.returncode == 0, f"a trial ended with {child.returncode}: {child.stderr.decode(errors='replace')}"


def write_texts(start: LLMatcher, first_byte_id: int) -> None:
    """Random texts, or their beginnings.

    Args:
        first_byte_id: the token of the byte 0; the others follow.

    Raises:
        ValueError: the library gives one up.
    """
    for number in range(_NUM_TEXTS):
        matcher, choice = start.deep_copy(), random.Random(number)
        for _ in range(_TEXT_BYTES):
            mask = int.from_bytes(matcher.compute_bitmask(), "little") >> first_byte_id
            allowed = [byte for byte in range(256) if mask >> byte & 1]
            if not allowed or matcher.is_error():
                break
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
    grammar, vocab_size, names, eos_token_ids, max_cpu_s = json.loads(sys.stdin.buffer.read())
    special = SpecialIds(vocab_size, {int(token_id): name for token_id, name in names.items()}, eos_token_ids)
    tokenizer = byte_tokenizer(special)
    _limit_memory()
    # Its signal ends the process, whatever the library is at.
    signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
    try:
        write_texts(start_of(grammar, tokenizer), vocab_size)
    except ValueError as exc:
        sys.stdout.write(str(exc))
        return _REFUSED
    except MemoryError:
        return _NO_MEMORY
    return 0


if __name__ == "__main__":
    sys.exit(main())

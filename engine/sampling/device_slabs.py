"""Rows worked on at once: in float64, a large batch over a large vocabulary would take gigabytes."""

from collections.abc import Iterator

# Each takes some 50 bytes while it is worked on.
ENTRIES_AT_ONCE = 1 << 22


def slabs(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Runs of rows, together all of them, a row at least."""
    step = max(1, ENTRIES_AT_ONCE // vocab_size)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))

"""Public workload traces, read as they are published.

Two formats, told apart by what is in the file, gzipped or not:

* *Azure* (LLM inference 2023; Splitwise, ISCA 2024): CSV of `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. Timestamps
  have seven decimals, one more than a `datetime` keeps.
* *Mooncake* (FAST 2025): JSON lines of `timestamp` in milliseconds, `input_length`, `output_length` and `hash_ids`, one
  id for each 512 tokens of the prompt. An id names a prompt up to and including its block, so it always has the same
  position and the same parent; a prompt's last block is usually filled in part.

Many requests share a timestamp (Mooncake's come in steps of seconds): the order of the file is kept among them.
"""

import csv
import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path

MOONCAKE_BLOCK_SIZE = 512  # tokens that a hash id stands for

_TICKS_PER_S = 10_000_000  # Azure's timestamps; integers, so that their differences are exact
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float  # after the trace's first request
    input_len: int  # tokens
    output_len: int  # tokens
    hash_ids: tuple[int, ...] = ()  # of the prompt's blocks, the last one perhaps filled in part; empty: not published

    @property
    def num_full_blocks(self) -> int:
        """Leading `hash_ids` whose blocks are full: what a prefix cache can share as a whole."""
        return self.input_len // MOONCAKE_BLOCK_SIZE if self.hash_ids else 0


@dataclass(frozen=True, slots=True)
class _Row:
    ticks: int
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of one file, by arrival; those that arrive together in the order of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is of neither format, or a line of it is wrong; the message names file and line.
    """
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as lines:
        first = lines.readline()
        parse = _mooncake_rows if first.lstrip().startswith("{") else _azure_rows
        rows = list(_located(path.name, parse, chain([first], lines)))
    if not rows:
        raise ValueError(f"{path.name} has no request")
    rows.sort(key=lambda row: row.ticks)  # stable
    began = rows[0].ticks
    return [TraceRequest((r.ticks - began) / _TICKS_PER_S, r.input_len, r.output_len, r.hash_ids) for r in rows]


def scaled(request: TraceRequest, block_size: int) -> TraceRequest:
    """A request as much shorter, or longer, as `block_size` is than the trace's; what prompts share shrinks with them.

    Args:
        block_size: tokens that a hash id stands for afterwards.
    """
    input_len = -(-request.input_len * block_size // MOONCAKE_BLOCK_SIZE)
    output_len = max(1, round(request.output_len * block_size / MOONCAKE_BLOCK_SIZE))
    return replace(request, input_len=input_len, output_len=output_len)


def prompt_token_ids(
    request: TraceRequest,
    index: int,
    token_ids: Sequence[int],
    *,
    block_size: int = MOONCAKE_BLOCK_SIZE,
    salt: str = "",
) -> list[int]:
    """A prompt that shares prefixes as the trace's requests do.

    Tokens are drawn by hash id, so equal ids are equal tokens; a last block that is filled in part is the beginning of
    its block. Where no ids are published, every request has tokens of its own.

    Args:
        index: of the request in its trace; what tells those without ids apart.
        token_ids: that tokens are drawn from.
        block_size: tokens that a hash id stands for.
        salt: prompts of different salts share nothing, as if they came from different traces.
    """
    if not request.hash_ids:
        return random.Random(f"{salt} request {index}").choices(token_ids, k=request.input_len)
    prompt: list[int] = []
    for hash_id in request.hash_ids[: -(-request.input_len // block_size)]:
        prompt += random.Random(f"{salt} block {hash_id}").choices(token_ids, k=block_size)
    return prompt[: request.input_len]


def _located(name: str, parse: Callable[[Iterable[str]], Iterator[_Row]], lines: Iterable[str]) -> Iterator[_Row]:
    """Says in errors where they are."""
    number = 0

    def counted() -> Iterator[str]:
        nonlocal number
        for line in lines:
            number += 1
            yield line

    try:
        for row in parse(counted()):
            if row.input_len < 1 or row.output_len < 1:
                raise ValueError(f"a request of {row.input_len} tokens that generates {row.output_len}")
            yield row
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{name}, line {number}: {error}") from error


def _azure_rows(lines: Iterable[str]) -> Iterator[_Row]:
    reader = csv.reader(lines)
    header = next(reader, [])
    if header != _AZURE_COLUMNS:
        raise ValueError(f"expected the columns {', '.join(_AZURE_COLUMNS)} or JSON lines, not {header}")
    for row in reader:
        if row:
            timestamp, input_len, output_len = row
            yield _Row(_azure_ticks(timestamp), int(input_len), int(output_len))


def _azure_ticks(timestamp: str) -> int:
    """`2023-11-16 18:17:03.9799600` in units of its last digit, from the year 1 on."""
    whole, _, fraction = timestamp.partition(".")
    since = datetime.fromisoformat(whole) - datetime.min
    if not fraction.isdecimal() or len(fraction) > 7:
        raise ValueError(f"a timestamp with up to seven decimals, not {timestamp!r}")
    return (since.days * 86_400 + since.seconds) * _TICKS_PER_S + int(fraction.ljust(7, "0"))


def _mooncake_rows(lines: Iterable[str]) -> Iterator[_Row]:
    places: dict[int, tuple[int, int | None]] = {}  # of each hash id: its position and its parent
    for line in lines:
        if not line.strip():
            continue
        fields = json.loads(line)
        input_len, hash_ids = fields["input_length"], tuple(fields["hash_ids"])
        expected = -(-input_len // MOONCAKE_BLOCK_SIZE)
        if len(hash_ids) != expected:
            raise ValueError(f"{len(hash_ids)} hash ids for {input_len} tokens, which are {expected} blocks")
        parent = None
        for position, hash_id in enumerate(hash_ids):
            if places.setdefault(hash_id, (position, parent)) != (position, parent):
                raise ValueError(f"hash id {hash_id} follows {parent} at {position}, but was elsewhere before")
            parent = hash_id
        ticks = round(fields["timestamp"] * (_TICKS_PER_S // 1000))
        yield _Row(ticks, input_len, fields["output_length"], hash_ids)

"""Readers of public traces, on made-up files of the same formats."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.traces import TraceRequest, prompt_token_ids, read_trace, scaled

IDS = range(256, 1256)

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 23:59:59.9799601,4808,10\r\n"
    "2023-11-16 23:59:59.9799602,3180,8\r\n"
    "2023-11-17 00:00:01.0000000,7,1"  # as published: carriage returns, and no end of the last line
)


def mooncake(*rows: tuple[float, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def test_azures_seventh_decimal_counts_and_midnight_passes(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(AZURE.encode())
    first, second, third = read_trace(path)
    assert first == TraceRequest(0.0, 4808, 10)
    assert second == TraceRequest(1e-7, 3180, 8)
    assert third == TraceRequest(1.0200399, 7, 1)


@pytest.mark.parametrize(("name", "text"), [("a.csv.gz", AZURE), ("m.jsonl.gz", mooncake((0, 5, 1, [0])))])
def test_a_gzipped_file_reads_as_the_plain_one(tmp_path: Path, name: str, text: str) -> None:
    packed, plain = tmp_path / name, tmp_path / name.removesuffix(".gz")
    packed.write_bytes(gzip.compress(text.encode()))
    plain.write_bytes(text.encode())
    assert read_trace(packed) == read_trace(plain)


def test_requests_that_arrive_together_keep_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake((3000, 9, 1, [0]), (0, 30, 2, [0]), (3000, 8, 1, [0]), (3000, 10, 3, [0])))
    assert [(r.arrival_s, r.input_len) for r in read_trace(path)] == [(0.0, 30), (3.0, 9), (3.0, 8), (3.0, 10)]


def test_a_last_block_that_is_filled_in_part_is_not_counted_as_full(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake((0, 1024, 1, [0, 1]), (0, 1025, 1, [0, 1, 2])))
    exact, partial = read_trace(path)
    assert (exact.num_full_blocks, len(exact.hash_ids)) == (2, 2)
    assert (partial.num_full_blocks, len(partial.hash_ids)) == (2, 3)
    assert TraceRequest(0.0, 1024, 1).num_full_blocks == 0


def test_prompts_share_what_their_hash_ids_share() -> None:
    one = prompt_token_ids(TraceRequest(0.0, 600, 1, (0, 1)), 0, IDS)
    longer = prompt_token_ids(TraceRequest(0.0, 1000, 1, (0, 1)), 1, IDS)
    other = prompt_token_ids(TraceRequest(0.0, 600, 1, (0, 2)), 2, IDS)
    assert longer[:600] == one
    assert other[:512] == one[:512]
    assert other[512:] != one[512:]
    assert {len(one), len(longer), len(other)} == {600, 1000}
    assert all(token_id in IDS for token_id in longer)


def test_prompts_without_hash_ids_share_nothing() -> None:
    request = TraceRequest(0.0, 64, 1)
    assert prompt_token_ids(request, 0, IDS) != prompt_token_ids(request, 1, IDS)
    assert prompt_token_ids(request, 1, IDS) == prompt_token_ids(request, 1, IDS)


def test_prompts_of_different_salts_share_nothing() -> None:
    request = TraceRequest(0.0, 600, 1, (0, 1))
    one, other = (prompt_token_ids(request, 0, IDS, salt=salt) for salt in ("round 1", "round 2"))
    assert len(one) == len(other) == 600
    assert one[:16] != other[:16]


@pytest.mark.parametrize("block_size", [1, 51, 512, 1024])
def test_scaled_prompts_still_share_what_their_hash_ids_share(block_size: int) -> None:
    originals = [
        TraceRequest(0.0, 1024, 100, (0, 1)),
        TraceRequest(0.0, 1025, 1, (0, 1, 2)),
        TraceRequest(0.0, 5, 9, (0,)),
    ]
    requests = [scaled(request, block_size) for request in originals]
    exact, longer, short = (prompt_token_ids(r, i, IDS, block_size=block_size) for i, r in enumerate(requests))
    assert [len(exact), requests[0].output_len] == [2 * block_size, max(1, round(100 * block_size / 512))]
    assert longer[: 2 * block_size] == exact
    assert len(longer) == requests[1].input_len > len(exact)
    assert exact[: len(short)] == short != []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected the columns"),
        ("TIMESTAMP,Tokens\n", "line 1: expected the columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no request"),
        (AZURE.replace("3180", "many"), "line 3: invalid literal"),
        (AZURE.replace("3180", "0"), "line 3: a request of 0 tokens that generates 8"),
        (AZURE.replace(".9799602", ".97996021"), "line 3: a timestamp with up to seven decimals"),
        (mooncake((0, 513, 1, [0])), "line 1: 1 hash ids for 513 tokens, which are 2 blocks"),
        (mooncake((0, 600, 1, [0, 1]), (0, 600, 1, [1, 2])), "line 2: hash id 1 follows None at 0"),
        ('{"timestamp": 0}\n', "line 1: 'input_length'"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(text.encode())
    with pytest.raises(ValueError, match=message):
        read_trace(path)

"""The gateway's benchmark: both ways in count every token, and figures are of the gateway alone."""

import asyncio
import cProfile
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.gateway import Load, Run, loads_table, main, processor_s, profile_table
from benchmarks.gateway_load import Answer, AnswerBroken, HttpClient, WorkerClient, run_lanes
from decode_worker import DecodeWorker
from engine.config import EngineConfig
from worker.config import WorkerConfig


def run_of(load: Load, way: str, *, seconds: float = 2.0, latency_ms: float = 1.0, cpu_s: float = 0.0) -> Run:
    return Run(load, way, 100, seconds, latency_ms, latency_ms, cpu_s)


def test_what_is_added_and_what_a_core_is_good_for_follow_from_medians() -> None:
    short, long = Load(8, 1), Load(8, 11)
    runs = {
        (short, "direct"): [run_of(short, "direct", latency_ms=ms) for ms in (1.0, 2.0, 9.0)],
        (short, "gateway"): [run_of(short, "gateway", latency_ms=5.0, cpu_s=0.1)],
        (long, "direct"): [run_of(long, "direct")],
        (long, "gateway"): [run_of(long, "gateway", seconds=4.0, cpu_s=0.2)],
    }
    table = loads_table(runs)
    row = dict(zip([column.name for column in table.columns], table.rows[0], strict=True))
    assert (row["direct"], row["gateway"], row["added"]) == (2.0, 5.0, 3.0)
    assert table.column("added") == [3.0, None]  # of several tokens, some come while others are computed
    assert (row["req/s"], row["CPU"], row["busy, %"]) == pytest.approx((50, 1.0, 5.0))
    # 1 ms more for ten tokens more.
    assert table.notes == [
        "8 lanes: a core is good for 1,000 requests/s, or 10,000 tokens/s of running streams (100 µs a token)"
    ]


def test_a_profile_names_what_takes_longest_and_leaves_waiting_out(tmp_path: Path) -> None:
    profile = cProfile.Profile()
    profile.runcall(sorted, [3, 1, 2] * 1000)
    profile.dump_stats(tmp_path / "x.prof")
    table = profile_table(tmp_path / "x.prof", 1)
    assert "sorted" in str(table.column("function")[0])
    assert len(table.rows) == 1


def test_a_processs_time_rises_with_its_work() -> None:
    before = processor_s(os.getpid())
    while processor_s(os.getpid()) == before:
        sum(range(10_000))


class Recording:
    """Answers at once, and remembers."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.lanes: set[int] = set()
        self.most_at_once = 0
        self._now = 0

    async def ask(self, lane: int, prompt: Sequence[int], num_tokens: int) -> Answer:
        self.prompts.append(tuple(prompt))
        self.lanes.add(lane)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        await asyncio.sleep(0)
        self._now -= 1
        return Answer(0.0, 0.0, num_tokens)


async def test_lanes_share_the_requests_and_no_two_prompts_begin_alike() -> None:
    client = Recording()
    answers, _ = await run_lanes(client, 3, 20, prompt_len=32, num_tokens=5, seed=4)
    assert len(answers) == 20
    assert len({prompt[:3] for prompt in client.prompts}) == 20
    assert {len(prompt) for prompt in client.prompts} == {32}
    assert (client.lanes, client.most_at_once) == ({0, 1, 2}, 3)


async def test_a_broken_answer_ends_the_lanes_as_itself() -> None:
    class Broken:
        async def ask(self, lane: int, prompt: Sequence[int], num_tokens: int) -> Answer:
            raise AnswerBroken("no answer")

    with pytest.raises(AnswerBroken, match="no answer"):
        await run_lanes(Broken(), 3, 20, prompt_len=32, num_tokens=5, seed=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lanes", "0"], "argument --lanes: numbers of at least 1, not 0"),
        (["--tokens", "1,x"], "argument --tokens: whole numbers with commas between them, not '1,x'"),
        (["--requests", "0"], "argument --requests: at least 1, not 0"),
        (["--rounds", "one"], "argument --rounds: a whole number, not 'one'"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


async def test_a_session_brings_each_lane_its_tokens() -> None:
    worker = DecodeWorker(WorkerConfig(engine=EngineConfig(num_blocks=64, max_model_len=256), executor="hash"))
    address = await worker.start()
    try:
        async with WorkerClient(address) as client:
            answers, _ = await run_lanes(client, 4, 12, prompt_len=32, num_tokens=5, seed=0)
            assert [answer.num_tokens for answer in answers] == [5] * 12
            assert all(0 < answer.first_s <= answer.end_s for answer in answers)
            with pytest.raises(AnswerBroken, match="the worker has ended the session"):
                await client.ask(0, [], 5)  # refused
    finally:
        await worker.stop()


@asynccontextmanager
async def http_server(reply: bytes) -> AsyncIterator[str]:
    """Answers everything with these bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"HTTP/1.1 503 Busy\r\n\r\n", "503 Busy"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {", "200 OK"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"token_ids":[1]}data: [DONE]\n\n\r\n0\r\n\r\n', "1 tokens instead of 2"),
    ],
)
async def test_an_answer_that_is_not_whole_is_no_measurement(reply: bytes, message: str) -> None:
    async with http_server(reply) as base_url, HttpClient(base_url, "m") as client:
        with pytest.raises(AnswerBroken, match=message):
            await client.ask(0, [1], 2)


async def test_a_connection_that_the_server_has_closed_is_made_anew() -> None:
    whole = b'HTTP/1.1 200 OK\r\n\r\ndata: {"token_ids":[1]}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n'
    async with http_server(whole) as base_url, HttpClient(base_url, "m") as client:
        for _ in range(2):
            assert (await client.ask(0, [1], 1)).num_tokens == 1
            reader, _ = client._lanes[0]
            assert await reader.read() == b""


def test_loads_and_profile_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "gateway.json"
    small = ["--lanes", "2", "--tokens", "1,3", "--requests", "6", "--rounds", "1", "--profile", "3"]
    allowed = os.sched_getaffinity(0)
    main([*small, "--json", str(out)])
    assert os.sched_getaffinity(0) == allowed
    written = json.loads(out.read_text())
    assert [(run["way"], run["load"]["num_tokens"]) for run in written["runs"]] == [
        ("direct", 1), ("gateway", 1), ("direct", 3), ("gateway", 3),
    ]  # fmt: skip
    assert len(written["tables"]["profile"]["rows"]) == 3
    assert "a core is good for" in capsys.readouterr().out

"""When requests are due, and what a record says of one."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from cluster.cli.api_client import ApiClient
from cluster.cli.open_loop import (
    LoadConfig,
    PlannedRequest,
    RequestRecord,
    Sampling,
    plan_load,
    run_load,
    run_requests,
)


def load(**changes: Any) -> LoadConfig:
    values = {"num_requests": 2000, "request_rate": 4.0, "input_len": 8, "output_len": 4} | changes
    return LoadConfig(**values)


def test_equal_seeds_plan_equal_loads() -> None:
    assert plan_load(load(seed=3)) == plan_load(load(seed=3))
    assert plan_load(load(seed=3)) != plan_load(load(seed=4))


def test_arrivals_are_poisson_with_the_rate_asked_for() -> None:
    due = [request.due_s for request in plan_load(load())]
    gaps = [later - earlier for earlier, later in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert due[0] == 0
    assert mean == pytest.approx(1 / 4, rel=0.1)
    assert variance == pytest.approx(1 / 16, rel=0.2)  # of an exponential: the square of its mean


def test_all_are_due_at_once_without_a_rate() -> None:
    assert {request.due_s for request in plan_load(load(request_rate=None))} == {0}


def test_record_counts_times_from_when_the_request_was_due() -> None:
    record = RequestRecord(
        due_s=7.0,
        sent_s=0.5,
        chunk_s=(1.0, 1.5, 3.0),
        chunk_tokens=(1, 1, 3),
        end_s=3.25,
        num_prompt_tokens=8,
        num_cached_tokens=0,
        num_output_tokens=5,
    )
    assert record.ttft_s == 1.0
    assert record.itl_s == [0.5, 1.5]
    assert record.tpot_s == 0.5


async def test_requests_are_sent_when_due_however_late_the_answers(server: Any) -> None:
    now = 0.0
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        now += seconds
        await asyncio.sleep(0)

    config = load(num_requests=6)
    ended: list[RequestRecord] = []
    async with ApiClient(server.base_url) as client:
        records, _ = await run_load(client, "scripted", config, ended.append, clock=lambda: now, sleep=sleep)
    due = [request.due_s for request in plan_load(config)]
    assert waits == pytest.approx([later - earlier for earlier, later in pairwise(due)])
    assert [record.num_output_tokens for record in records] == [3] * 6
    assert sorted(map(id, ended)) == sorted(map(id, records))


async def test_each_request_asks_for_its_own_length(server: Any) -> None:
    requests = [PlannedRequest(0.0, (300,) * length, output_len=10 * length) for length in (1, 2, 3)]
    async with ApiClient(server.base_url) as client:
        records, _ = await run_requests(client, "scripted", requests, Sampling(temperature=0.5, seed=9))
    assert sorted((len(sent["prompt"]), sent["max_tokens"]) for sent in server.requests) == [(1, 10), (2, 20), (3, 30)]
    assert {(sent["temperature"], sent["seed"]) for sent in server.requests} == {(0.5, 9)}
    assert [record.error for record in records] == [None] * 3


async def test_a_chunk_counts_the_tokens_that_the_server_lists_else_its_text_as_one(server: Any) -> None:
    async with ApiClient(server.base_url) as client:
        [plain], _ = await run_requests(client, "scripted", [PlannedRequest(0.0, (300,), 9)], Sampling())
        server.token_ids = [[7], [], [8, 9]]
        server.pieces = ["", "", "Paris"]
        [listed], _ = await run_requests(client, "scripted", [PlannedRequest(0.0, (300,), 9)], Sampling())
    assert plain.chunk_tokens == (1, 1, 1)
    assert listed.chunk_tokens == (1, 2)  # nothing came with the one between


async def test_requests_are_left_once_there_is_enough(server: Any) -> None:
    asked = 0

    def enough() -> bool:
        nonlocal asked
        asked += 1
        return asked == 2

    async with ApiClient(server.base_url) as client:
        [record], _ = await run_requests(
            client, "scripted", [PlannedRequest(0.0, (300,), 9)], Sampling(), enough=enough
        )
    assert (len(record.chunk_s), record.num_output_tokens, record.error) == (2, 2, None)

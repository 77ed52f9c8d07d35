"""The load of a round: streams that decode all the time, and prompts that arrive in the midst of it.

    0 s        lead_s                       lead_s + window_s
    |  streams |  prompts arrive (Poisson)  |  the last prompts get their answers; the streams are left
               |<------- the window ------->|

What is said of the streams is said of the window: before it they have the server to themselves.
"""

import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cpu_time import CpuTime, Snapshot
from cluster.cli.api_client import ApiClient
from cluster.cli.open_loop import (
    TOKEN_IDS,
    LoadConfig,
    PlannedRequest,
    RequestRecord,
    Sampling,
    run_load,
    run_requests,
)

_CAPACITY_PROMPTS = 6


class SpoiltRun(Exception):
    """A round that shows nothing: a request failed, or the streams did not run through the window."""


@dataclass(frozen=True, slots=True)
class RoundLoad:
    """Lengths in tokens. Equal values make equal requests at equal times.

    Raises:
        ValueError: a value that is not allowed; the message names it.
    """

    rate: float  # prompts a second
    seed: int
    num_streams: int = 8
    stream_prompt_len: int = 32
    stream_len: int = 8000  # more than a stream can get in a round: it is left, it does not end
    prompt_len: int = 1000
    answer_len: int = 16  # of a prompt: its cache is handed over, and it decodes beside the streams for a while
    lead_s: float = 5.0
    window_s: float = 45.0

    def __post_init__(self) -> None:
        for name in ("num_streams", "stream_prompt_len", "stream_len", "prompt_len", "answer_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("rate", "lead_s", "window_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")

    @property
    def window(self) -> tuple[float, float]:
        """In seconds since the streams were sent."""
        return self.lead_s, self.lead_s + self.window_s

    def plan_streams(self) -> list[PlannedRequest]:
        draw = random.Random(f"streams {self.seed}")
        prompts = [tuple(draw.choices(TOKEN_IDS, k=self.stream_prompt_len)) for _ in range(self.num_streams)]
        return [PlannedRequest(0.0, prompt, self.stream_len) for prompt in prompts]

    def plan_prompts(self) -> list[PlannedRequest]:
        """Due within the window; the first as far into it as chance has it."""
        draw = random.Random(f"prompts {self.seed}")
        begin, end = self.window
        planned = []
        while (begin := begin + draw.expovariate(self.rate)) < end:
            planned.append(PlannedRequest(begin, tuple(draw.choices(TOKEN_IDS, k=self.prompt_len)), self.answer_len))
        return planned


@dataclass(frozen=True, slots=True)
class RoundRecords:
    """What came of a round's load."""

    streams: Sequence[RequestRecord]
    prompts: Sequence[RequestRecord]
    cpu: CpuTime  # in the window


async def run_round(base_url: str, load: RoundLoad) -> RoundRecords:
    """
    Raises:
        SpoiltRun: it does not show what it should.
        ServerError: the server does not say which model it serves.
    """
    prompts, streams = load.plan_prompts(), load.plan_streams()
    if not prompts:
        raise SpoiltRun(f"no prompt arrives in {load.window_s:g} s at {load.rate:g} a second; make the window longer")
    over = asyncio.Event()
    sampling = Sampling(seed=load.seed)
    async with ApiClient(base_url) as client:
        model = await client.model()

        async def answered() -> Sequence[RequestRecord]:
            records, seconds = await run_requests(client, model, prompts, sampling)
            await asyncio.sleep(max(0.0, load.window[1] - seconds))
            over.set()
            return records

        (of_streams, _), of_prompts, cpu = await asyncio.gather(
            run_requests(client, model, streams, sampling, enough=over.is_set), answered(), _cpu_time(load)
        )
    records = RoundRecords(of_streams, of_prompts, cpu)
    check_round(records, load)
    return records


async def _cpu_time(load: RoundLoad) -> CpuTime:
    await asyncio.sleep(load.lead_s)
    begin = Snapshot.take()
    await asyncio.sleep(load.window_s)
    return CpuTime.between(begin, Snapshot.take(), os.getpid())


def check_round(records: RoundRecords, load: RoundLoad) -> None:
    """
    Raises:
        SpoiltRun: a request failed, or a stream did not run through the window.
    """
    begin, end = load.window
    for record in (*records.streams, *records.prompts):
        if record.error is not None:
            raise SpoiltRun(f"a request failed: {record.error}")
    for stream in records.streams:
        if stream.due_s + stream.chunk_s[0] > begin:
            raise SpoiltRun(f"a stream began {stream.chunk_s[0]:.1f} s after it was sent; make the lead longer")
        if (last_s := stream.due_s + stream.chunk_s[-1]) < end:
            raise SpoiltRun(f"a stream ended after {last_s:.1f} s, within the window; make streams longer")


async def prefill_capacity(base_url: str, prompt_len: int, seed: int) -> float:
    """Prompts a second that a server prefills when they wait in a row. One goes before, uncounted."""
    async with ApiClient(base_url) as client:
        model = await client.model()
        for num_prompts in (1, _CAPACITY_PROMPTS):
            config = LoadConfig(num_prompts, None, input_len=prompt_len, output_len=1, seed=seed + num_prompts)
            records, seconds = await run_load(client, model, config, lambda record: None)
            if errors := [record.error for record in records if record.error is not None]:
                raise SpoiltRun(f"a request failed: {errors[0]}")
    return len(records) / seconds

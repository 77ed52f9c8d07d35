"""Load as independent clients make it: requests start when their time has come, however slow the answers are.

A request's life: due at a time drawn beforehand; sent; its first token; more tokens; ended, left or failed. Times count
from when it was due, so that a server which keeps a client waiting cannot hide it.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cluster.cli.api_client import ApiClient, ServerError

Clock = Callable[[], float]

# Ids that every tokenizer of the field has as ordinary tokens.
TOKEN_IDS = range(256, 8192)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the answers of a load are drawn."""

    temperature: float = 0.0  # 0: greedy
    ignore_eos: bool = True  # answers go on to their full length
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """What is sent. Lengths are in tokens; equal configurations send equal requests at equal times.

    Raises:
        ValueError: a value that is not allowed; the message names it.
    """

    num_requests: int
    request_rate: float | None  # a second, Poisson; None: all at once
    input_len: int
    output_len: int
    prefix_len: int = 0  # leading tokens that all prompts share; counted within input_len
    temperature: float = 0.0
    ignore_eos: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_requests", 1), ("input_len", 1), ("output_len", 1), ("prefix_len", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.prefix_len > self.input_len:
            raise ValueError(f"prefix_len must be at most input_len ({self.input_len}), not {self.prefix_len}")
        if self.request_rate is not None and not 0 < self.request_rate < float("inf"):
            raise ValueError(f"request_rate must be above 0 requests a second, not {self.request_rate}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, not {self.temperature}")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.ignore_eos, self.seed)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, before it is due."""

    due_s: float  # since the start
    prompt_token_ids: tuple[int, ...]
    output_len: int  # tokens


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, after it has ended. All times but `due_s` in seconds since it was due."""

    due_s: float  # since the load's start
    sent_s: float
    chunk_s: tuple[float, ...]  # when each chunk with tokens came
    chunk_tokens: tuple[int, ...]  # of each chunk; 1 where the server does not say
    end_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.chunk_s[0]

    @property
    def itl_s(self) -> list[float]:
        """Times between chunks: a server may put the tokens of several steps in one."""
        return [later - earlier for earlier, later in pairwise(self.chunk_s)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None where there is only one."""
        if self.num_output_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_output_tokens - 1)


def plan_load(config: LoadConfig) -> list[PlannedRequest]:
    """The requests in the order in which they are due, the first at once."""
    draw = random.Random(config.seed)
    prefix = tuple(draw.choices(TOKEN_IDS, k=config.prefix_len))
    planned, due_s = [], 0.0
    for _ in range(config.num_requests):
        rest = tuple(draw.choices(TOKEN_IDS, k=config.input_len - config.prefix_len))
        planned.append(PlannedRequest(due_s, prefix + rest, config.output_len))
        if config.request_rate is not None:
            due_s += draw.expovariate(config.request_rate)
    return planned


async def run_load(
    client: ApiClient,
    model: str,
    config: LoadConfig,
    on_end: Callable[[RequestRecord], None],
    *,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> tuple[Sequence[RequestRecord], float]:
    """Sends what a configuration plans; see `run_requests`."""
    planned = plan_load(config)
    return await run_requests(client, model, planned, config.sampling, on_end=on_end, clock=clock, sleep=sleep)


async def run_requests(
    client: ApiClient,
    model: str,
    requests: Sequence[PlannedRequest],
    sampling: Sampling,
    *,
    on_end: Callable[[RequestRecord], None] = lambda record: None,
    enough: Callable[[], bool] = lambda: False,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> tuple[Sequence[RequestRecord], float]:
    """Sends it all; returns the records, in order, and how many seconds it took.

    Args:
        requests: in the order in which they are due.
        on_end: told of each request as it ends.
        enough: asked at each chunk; a request is left, as by a client that goes away, once it says so.
    """
    start = clock()

    async def send(request: PlannedRequest) -> RequestRecord:
        payload = _payload(model, sampling, request)
        record = await _send(client, payload, request.due_s, lambda: clock() - start - request.due_s, enough)
        on_end(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = []
        for request in requests:
            if (wait_s := request.due_s - (clock() - start)) > 0:
                await sleep(wait_s)
            tasks.append(group.create_task(send(request)))
    return [task.result() for task in tasks], clock() - start


def _payload(model: str, sampling: Sampling, request: PlannedRequest) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "max_tokens": request.output_len,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "stream_options": {"include_usage": True},
        # Else a token that has no text yet would be seen only with the next one: half of a character, say.
        "return_token_ids": True,
    }


async def _send(
    client: ApiClient, payload: dict[str, Any], due_s: float, elapsed: Clock, enough: Callable[[], bool]
) -> RequestRecord:
    sent_s = elapsed()
    chunk_s: list[float] = []
    chunk_tokens: list[int] = []
    usage: dict[str, Any] = {}
    error: str | None = None
    try:
        async with client.stream("/v1/completions", payload) as stream:
            async for chunk in stream.chunks:
                if num_tokens := _num_tokens(chunk):
                    chunk_s.append(elapsed())
                    chunk_tokens.append(num_tokens)
                usage = chunk.get("usage") or usage
                if enough():
                    break
        if not chunk_s:
            error = "the server ended its answer without a token"
    except ServerError as exc:
        error = str(exc)
    return RequestRecord(
        due_s=due_s,
        sent_s=sent_s,
        chunk_s=tuple(chunk_s),
        chunk_tokens=tuple(chunk_tokens),
        end_s=elapsed(),
        num_prompt_tokens=usage.get("prompt_tokens", len(payload["prompt"])),
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        num_output_tokens=usage.get("completion_tokens", sum(chunk_tokens)),
        error=error,
    )


def _num_tokens(chunk: dict[str, Any]) -> int:
    """Of all choices. Where the server does not list them, text counts as one."""
    return sum(len(choice.get("token_ids") or ()) or bool(choice.get("text")) for choice in chunk.get("choices") or ())

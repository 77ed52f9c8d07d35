"""Load as independent clients make it: requests start when their time has come, however slow the answers are.

A request's life: due at a time drawn beforehand; sent; its first token; more tokens; ended or failed. Times count from
when it was due, so that a server which keeps a client waiting cannot hide it.
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
_TOKEN_IDS = range(256, 8192)


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


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, before it is due."""

    due_s: float  # since the start
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, after it has ended. Times in seconds since it was due."""

    sent_s: float
    chunk_s: tuple[float, ...]  # when each chunk with tokens came
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
    prefix = tuple(draw.choices(_TOKEN_IDS, k=config.prefix_len))
    planned, due_s = [], 0.0
    for _ in range(config.num_requests):
        rest = tuple(draw.choices(_TOKEN_IDS, k=config.input_len - config.prefix_len))
        planned.append(PlannedRequest(due_s, prefix + rest))
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
    """Sends it all; returns the records, in order, and how many seconds it took.

    Args:
        on_end: told of each request as it ends.
    """
    start = clock()

    async def send(request: PlannedRequest) -> RequestRecord:
        record = await _send(client, _payload(model, config, request), lambda: clock() - start - request.due_s)
        on_end(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = []
        for request in plan_load(config):
            if (wait_s := request.due_s - (clock() - start)) > 0:
                await sleep(wait_s)
            tasks.append(group.create_task(send(request)))
    return [task.result() for task in tasks], clock() - start


def _payload(model: str, config: LoadConfig, request: PlannedRequest) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "max_tokens": config.output_len,
        "temperature": config.temperature,
        "seed": config.seed,
        "ignore_eos": config.ignore_eos,
        "stream_options": {"include_usage": True},
    }


async def _send(client: ApiClient, payload: dict[str, Any], elapsed: Clock) -> RequestRecord:
    sent_s = elapsed()
    chunk_s: list[float] = []
    usage: dict[str, Any] = {}
    error: str | None = None
    try:
        async with client.stream("/v1/completions", payload) as stream:
            async for chunk in stream.chunks:
                if any(choice.get("text") or choice.get("token_ids") for choice in chunk.get("choices") or ()):
                    chunk_s.append(elapsed())
                usage = chunk.get("usage") or usage
        if not chunk_s:
            error = "the server ended its answer without a token"
    except ServerError as exc:
        error = str(exc)
    return RequestRecord(
        sent_s=sent_s,
        chunk_s=tuple(chunk_s),
        end_s=elapsed(),
        num_prompt_tokens=usage.get("prompt_tokens", len(payload["prompt"])),
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        num_output_tokens=usage.get("completion_tokens", len(chunk_s)),
        error=error,
    )

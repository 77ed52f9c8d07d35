"""What is sent: requests of fixed lengths, or those of a trace; when: Poisson, or as in the trace."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from benchmarks.traces import MOONCAKE_BLOCK_SIZE, TraceRequest, prompt_token_ids, scaled
from cluster.cli.open_loop import TOKEN_IDS, LoadConfig, PlannedRequest, plan_load


class Load(Protocol):
    """Requests at one rate."""

    @property
    def rate(self) -> float:
        """Requests a second that are sent, in the mean."""
        ...

    def plan(self, seed: int) -> list[PlannedRequest]:
        """In the order in which they are due. Loads of different seeds share no prompt."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLoad:
    """Prompts of one length, answers of one length, Poisson. Implements `Load`."""

    config: LoadConfig  # its seed is not looked at

    @property
    def rate(self) -> float:
        assert self.config.request_rate is not None, "a load of a sweep has a rate"
        return self.config.request_rate

    def plan(self, seed: int) -> list[PlannedRequest]:
        return plan_load(replace(self.config, seed=seed))


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests of a trace, cut and scaled; prompts share a prefix where their hash ids are the same."""

    requests: tuple[TraceRequest, ...]
    block_size: int = MOONCAKE_BLOCK_SIZE  # tokens that a hash id stands for

    @classmethod
    def of(
        cls,
        requests: Sequence[TraceRequest],
        *,
        num_prompts: int,
        length_scale: float = 1.0,
        max_input_len: int | None = None,
        max_output_len: int | None = None,
    ) -> "Trace":
        """The first requests, shorter or longer by a factor, and then cut; what is cut off is the prompt's end.

        Raises:
            ValueError: a value that is not allowed, or a trace of fewer requests; the message names it.
        """
        for name, value in (("num_prompts", num_prompts), ("max_input_len", max_input_len)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if max_output_len is not None and max_output_len < 1:
            raise ValueError(f"max_output_len must be at least 1, not {max_output_len}")
        if not 0 < length_scale < math.inf:
            raise ValueError(f"length_scale must be above 0, not {length_scale}")
        if len(requests) < num_prompts:
            raise ValueError(f"num_prompts must be at most the trace's {len(requests)} requests, not {num_prompts}")
        block_size = max(1, round(length_scale * MOONCAKE_BLOCK_SIZE))
        taken = []
        for request in (scaled(request, block_size) for request in requests[:num_prompts]):
            input_len = min(request.input_len, max_input_len or request.input_len)
            output_len = min(request.output_len, max_output_len or request.output_len)
            taken.append(replace(request, input_len=input_len, output_len=output_len))
        return cls(tuple(taken), block_size)

    @property
    def rate(self) -> float:
        """Requests a second, as they came.

        Raises:
            ValueError: they came all at once.
        """
        duration_s = self.requests[-1].arrival_s
        if duration_s == 0:
            raise ValueError(
                f"the first {len(self.requests)} requests of the trace arrive together, so that they have no rate; "
                "take more of them, or give rates"
            )
        return (len(self.requests) - 1) / duration_s

    def prompts(self, seed: int) -> list[tuple[int, ...]]:
        salt = f"seed {seed}"
        return [
            tuple(prompt_token_ids(request, i, TOKEN_IDS, block_size=self.block_size, salt=salt))
            for i, request in enumerate(self.requests)
        ]


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """A trace, at its own times. Implements `Load`.

    Raises:
        ValueError: the speed is not above 0, or the trace has no rate.
    """

    trace: Trace
    speed: float  # 2: in half of the time

    def __post_init__(self) -> None:
        if not 0 < self.speed < math.inf:
            raise ValueError(f"trace_speed must be above 0, not {self.speed}")
        assert self.trace.rate > 0

    @property
    def rate(self) -> float:
        return self.speed * self.trace.rate

    def plan(self, seed: int) -> list[PlannedRequest]:
        return [
            PlannedRequest(request.arrival_s / self.speed, prompt, request.output_len)
            for request, prompt in zip(self.trace.requests, self.trace.prompts(seed), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class PoissonTraceLoad:
    """A trace's requests in its order, Poisson. Implements `Load`.

    Raises:
        ValueError: the rate is not above 0.
    """

    trace: Trace
    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rates must be above 0 requests a second, not {self.rate}")

    def plan(self, seed: int) -> list[PlannedRequest]:
        draw, due_s = random.Random(f"arrivals {seed}"), 0.0
        planned = []
        for request, prompt in zip(self.trace.requests, self.trace.prompts(seed), strict=True):
            planned.append(PlannedRequest(due_s, prompt, request.output_len))
            due_s += draw.expovariate(self.rate)
        return planned

"""Every load on every server in turn, round by round."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from benchmarks.serve.loads import Load
from cluster.cli.api_client import ApiClient, ServerError
from cluster.cli.goodput import Objectives
from cluster.cli.load_report import LoadReport
from cluster.cli.open_loop import LoadConfig, RequestRecord, Sampling, run_load, run_requests

# A seed that no load has, or that load would find these tokens cached. (-1 would not do: `random` takes it for 1.)
WARM_UP = LoadConfig(num_requests=1, request_rate=None, input_len=64, output_len=8, seed=1 << 40)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server, and what it is called in the report."""

    name: str
    base_url: str

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """From `name=URL`.

        Raises:
            ValueError: it is something else.
        """
        name, _, base_url = text.partition("=")
        if not name or "://" not in base_url:
            raise ValueError(f"an endpoint is name=URL, as in ours=http://127.0.0.1:8000, not {text!r}")
        return cls(name, base_url)


@dataclass(frozen=True, slots=True)
class Measured:
    """One load on one server, once."""

    endpoint: str
    rate: float  # requests a second that were sent
    round: int
    seed: int
    report: LoadReport
    records: Sequence[RequestRecord]


@dataclass(frozen=True, slots=True)
class _Turn:
    round: int
    load: Load
    seed: int
    endpoint: Endpoint


def turns(endpoints: Sequence[Endpoint], loads: Sequence[Load], rounds: int, seed: int) -> Iterator[_Turn]:
    """What is measured, in order. Who comes first changes from load to load, and for a load from round to round."""
    for round_ in range(rounds):
        for i, load in enumerate(loads):
            number = round_ * len(loads) + i
            first = (round_ + i) % len(endpoints)
            for endpoint in (*endpoints[first:], *endpoints[:first]):
                yield _Turn(round_, load, seed + number, endpoint)


async def sweep(
    endpoints: Sequence[Endpoint],
    loads: Sequence[Load],
    *,
    rounds: int,
    seed: int,
    sampling: Sampling,
    objectives: Objectives | None,
    on_measured: Callable[[Measured], None],
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 600.0,
) -> list[Measured]:
    """
    Args:
        sampling: its seed is replaced by that of each load.
        objectives: that a request keeps to be good; None: goodput is not looked at.
        on_measured: told of each.
        model: that is asked for; None: the first that each server names.

    Raises:
        ServerError: a server cannot be reached, or answers a first request with an error.
    """
    measured = []
    async with AsyncExitStack() as open_clients:
        clients: dict[str, tuple[ApiClient, str]] = {}
        for endpoint in endpoints:
            client = ApiClient(endpoint.base_url, api_key=api_key, timeout_s=timeout_s)
            await open_clients.enter_async_context(client)
            clients[endpoint.name] = client, model or await client.model()
            [warm_up], _ = await run_load(*clients[endpoint.name], WARM_UP, lambda record: None)
            if warm_up.error is not None:
                raise ServerError(f"{endpoint.name}: {warm_up.error}")
        for turn in turns(endpoints, loads, rounds, seed):
            planned, drawn = turn.load.plan(turn.seed), replace(sampling, seed=turn.seed)
            records, seconds = await run_requests(*clients[turn.endpoint.name], planned, drawn)
            report = LoadReport.of(records, seconds, objectives)
            measured.append(Measured(turn.endpoint.name, turn.load.rate, turn.round, turn.seed, report, records))
            on_measured(measured[-1])
    return measured

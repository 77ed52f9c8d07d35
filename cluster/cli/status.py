"""`tandem status`: a cluster at a glance, out of its gateway's metrics."""

import asyncio
import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated

import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cluster.cli.api_client import DEFAULT_BASE_URL, ApiClient, ServerError, trust
from cluster.cli.client_flags import ApiKeyFlag, CaFileFlag
from cluster.cli.errors import CommandError, fails_in_a_sentence


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker, as its metrics tell. Prefix counts are prompt tokens since its start."""

    worker_id: str
    role: str
    model_name: str
    running: int
    waiting: int
    transferring: int
    free_blocks: int
    cached_blocks: int
    active_blocks: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int

    @property
    def hit_rate(self) -> float | None:
        """Of prompt tokens; None before the first."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else None

    @property
    def usage(self) -> float:
        """Of the pool, by running requests: cached blocks can be had for the asking."""
        blocks = self.free_blocks + self.cached_blocks + self.active_blocks
        return self.active_blocks / blocks if blocks else 0.0


def worker_rows(metrics: str) -> list[WorkerRow]:
    """A row a worker out of a scrape, by role and id."""
    values: dict[tuple[str, str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            labels = sample.labels
            if not sample.name.startswith("tandem_") or "worker_id" not in labels:
                continue
            worker = (labels.get("role", ""), labels["worker_id"], labels.get("model_name", ""))
            state = f"_{labels['state']}" if "state" in labels else ""
            values[worker][sample.name.removeprefix("tandem_") + state] += sample.value
    rows = []
    for (role, worker_id, model_name), of_worker in sorted(values.items()):
        if "kv_blocks_free" not in of_worker:
            continue  # something else than a pool that carries the label, such as a count of routed requests

        def count(name: str, of_worker: dict[str, float] = of_worker) -> int:
            return int(of_worker[name])

        rows.append(
            WorkerRow(
                worker_id=worker_id,
                role=role,
                model_name=model_name,
                running=count("num_requests_running"),
                waiting=count("num_requests_waiting"),
                transferring=count("num_requests_transferring"),
                free_blocks=count("kv_blocks_free"),
                cached_blocks=count("kv_blocks_cached"),
                active_blocks=count("kv_blocks_active"),
                prefix_queries=count("prefix_cache_queries_total"),
                prefix_hits=count("prefix_cache_hits_total"),
                preemptions=count("num_preemptions_total"),
            )
        )
    return rows


@fails_in_a_sentence
def status(
    base_url: Annotated[str, typer.Option(help="Of the gateway.")] = DEFAULT_BASE_URL,
    api_key: ApiKeyFlag = None,
    ca_file: CaFileFlag = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show a cluster's workers, their blocks and their hit rates."""
    try:
        ready, metrics = asyncio.run(_fetch(base_url, api_key, ca_file))
    except ServerError as exc:
        raise CommandError(str(exc)) from exc
    rows = worker_rows(metrics)
    if as_json:
        typer.echo(json.dumps({"ready": ready, "workers": [dataclasses.asdict(row) for row in rows]}, indent=2))
    else:
        _print(Console(), base_url, ready, rows)


async def _fetch(base_url: str, api_key: str | None, ca_file: str | None) -> tuple[bool, str]:
    tls = None if ca_file is None else trust(ca_file)
    async with ApiClient(base_url, api_key=api_key, tls=tls, timeout_s=10.0) as client:
        health, metrics = await asyncio.gather(client.get("/health"), client.get("/metrics"))
    if metrics.status_code == HTTPStatus.UNAUTHORIZED:
        raise ServerError(f"{client.base_url} wants an API key: --api-key, or TANDEM_API_KEY")
    if metrics.is_error:
        raise ServerError(f"{client.base_url} has no metrics (status {metrics.status_code}); is it a Tandem gateway?")
    return health.is_success, metrics.text


def _print(console: Console, base_url: str, ready: bool, rows: Iterable[WorkerRow]) -> None:
    # Narrow enough for a terminal of 80 columns.
    table = Table(title=f"{base_url} · {'ready' if ready else 'not ready'}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("worker", no_wrap=True)
    for name in ("run", "wait", "move", "free", "cached", "active", "in use", "hits", "preempted"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        counts = (row.running, row.waiting, row.transferring, row.free_blocks, row.cached_blocks, row.active_blocks)
        hit_rate = "–" if row.hit_rate is None else f"{row.hit_rate:.0%}"
        table.add_row(row.worker_id, *(f"{n:,}" for n in counts), f"{row.usage:.0%}", hit_rate, f"{row.preemptions:,}")
    console.print(table)

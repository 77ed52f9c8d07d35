"""`/metrics` of the whole cluster in one scrape: the gateway's families and those of every worker, merged.

Each worker serves its own metrics over HTTP. They are fetched side by side within a fixed time; a worker that does not
answer is left out of this scrape (its absence shows in `tandem_workers_scraped`). Families of one name become one, and
a series that two sources claim is told once.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from cluster.worker_info import WorkerStatus

FETCH_TIMEOUT_S = 2.0


class ClusterScrape:
    """Collects from the workers; `close` it at the end.

    Args:
        client: to fetch with; by default one of its own.
    """

    def __init__(self, registry: CollectorRegistry, client: httpx.AsyncClient | None = None) -> None:
        self._registry = registry
        # trust_env: a proxy meant for the world must not stand before the workers.
        self._client = client or httpx.AsyncClient(timeout=FETCH_TIMEOUT_S, trust_env=False)

    async def close(self) -> None:
        """Closes its connections; idempotent."""
        await self._client.aclose()

    def gateway(self) -> bytes:
        """The gateway's own metrics, as Prometheus text."""
        return generate_latest(self._registry)

    async def cluster(self, workers: Sequence[WorkerStatus]) -> bytes:
        """The gateway's metrics and those of all reachable workers, as Prometheus text."""
        addresses = metrics_addresses(workers)
        fetched = await asyncio.gather(*(self._fetch(address) for address in addresses.values()))
        told = GaugeMetricFamily(
            "tandem_workers_scraped", "1: the worker's own metrics are in this scrape.", labels=("worker_id",)
        )
        for worker_id, families in zip(addresses, fetched, strict=True):
            told.add_metric((worker_id,), float(families is not None))
        merged = CollectorRegistry()
        sources: list[list[Metric]] = [
            list(self._registry.collect()),
            *(families for families in fetched if families),
            [told],
        ]
        merged.register(_Merged(merge_families(sources)))
        return generate_latest(merged)

    async def _fetch(self, address: str) -> list[Metric] | None:
        """A worker's families; none if it does not answer in time with Prometheus text."""
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                reply = await self._client.get(f"http://{address}/metrics")
            reply.raise_for_status()
            return list(text_string_to_metric_families(reply.text))
        except (httpx.HTTPError, TimeoutError, ValueError):
            return None


def metrics_addresses(workers: Iterable[WorkerStatus]) -> dict[str, str]:
    """By worker id: where its metrics are, host:port, for those that are there and serve any."""
    return {
        worker.info.worker_id: worker.info.metrics_address
        for worker in workers
        if worker.ready and worker.info is not None and worker.info.metrics_address
    }


def discovery_targets(workers: Iterable[WorkerStatus]) -> list[dict[str, object]]:
    """All workers that serve metrics, in the form of Prometheus' HTTP service discovery."""
    return [
        {
            "targets": [worker.info.metrics_address],
            "labels": {"worker_id": worker.info.worker_id, "role": worker.info.role.value},
        }
        for worker in workers
        if worker.info is not None and worker.info.metrics_address
    ]


def merge_families(sources: Iterable[Iterable[Metric]]) -> list[Metric]:
    """One family a name, described as its first source does; every series once, as its first source tells it."""
    merged: dict[str, Metric] = {}
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for families in sources:
        for family in families:
            if family.name.endswith("_created"):
                continue  # when a counter began: of no use to anyone here
            into = merged.get(family.name)
            if into is None:
                into = merged[family.name] = Metric(family.name, family.documentation, family.type)
            elif into.type != family.type:
                continue  # two programs mean different things by one name: the first one's meaning holds
            for sample in family.samples:
                series = (sample.name, _series(sample.labels))
                if series not in seen and not sample.name.endswith("_created"):
                    seen.add(series)
                    into.samples.append(sample)
    return list(merged.values())


def _series(labels: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


class _Merged(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)

"""A worker's Prometheus metrics: counted in the core, exported here.

The engine and the hand-offs count in plain dataclasses. At a scrape the collector turns the last of them into metric
families, so that nothing is counted twice and a step pays nothing; only histograms are observed as things happen.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.stats import EngineStats
from kvtransfer.counters import ConsumerCounters, HolderCounters
from kvtransfer.errors import Code
from kvtransfer.events import TransferStats
from kvtransfer.holder import HolderEnd

LABELS = ("model_name", "worker_id", "role")

# A hand-off's copying, from one small block on a fast link to a long prompt on a slow one.
SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BYTES_BUCKETS = tuple(float(4**exponent) for exponent in range(6, 19))  # 4 KiB to 64 GiB
SEGMENTS_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What there is to tell at a scrape."""

    engine: EngineStats
    num_transferring: int  # hand-offs, in and out
    given: HolderCounters
    taken: ConsumerCounters


class WorkerMetrics:
    """The registry of one worker, and its endpoint.

    Args:
        labels: values of `LABELS`, on every series.
        snapshot: called at each scrape, from the endpoint's thread.
    """

    def __init__(self, labels: tuple[str, str, str], snapshot: Callable[[], Snapshot]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_StatsCollector(labels, snapshot))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, LABELS, buckets=buckets, registry=self.registry).labels(*labels)

        self._transfer_seconds = histogram(
            "tandem_kv_transfer_seconds", "Seconds that the copies of one hand-off took.", SECONDS_BUCKETS
        )
        self._transfer_bytes = histogram("tandem_kv_transfer_bytes", "Bytes copied in one hand-off.", BYTES_BUCKETS)
        self._transfer_segments = histogram(
            "tandem_kv_transfer_segments", "Runs of consecutive blocks copied in one hand-off.", SEGMENTS_BUCKETS
        )

    def observe_transfer(self, stats: TransferStats) -> None:
        """A hand-off's copies, all of them."""
        self._transfer_seconds.observe(stats.seconds)
        self._transfer_bytes.observe(stats.bytes)
        self._transfer_segments.observe(stats.segments)

    def serve(self, host: str, port: int) -> "MetricsEndpoint":
        """Serves /metrics in a thread."""
        return MetricsEndpoint(self.registry, host, port)


class MetricsEndpoint:
    """A small HTTP server for scrapes."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._server, self._thread = start_http_server(port, host, registry)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stops serving; idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _StatsCollector(Collector):
    def __init__(self, labels: tuple[str, str, str], snapshot: Callable[[], Snapshot]) -> None:
        self._labels = labels
        self._snapshot = snapshot

    def describe(self) -> list[Metric]:
        return []  # names are checked at a scrape; asking for a snapshot before the engine runs would be too early

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        stats = now.engine

        blocks = GaugeMetricFamily("tandem_kv_blocks", "Blocks of the pool by state.", labels=(*LABELS, "state"))
        for state, count in (
            ("free", stats.num_free_blocks),
            ("cached", stats.num_cached_blocks),
            ("active", stats.num_active_blocks),
        ):
            blocks.add_metric((*self._labels, state), count)
        yield blocks

        yield self._gauge("tandem_kv_cache_usage_perc", "Share of the pool in use (1: full).", stats.kv_cache_usage)
        yield self._gauge("tandem_num_requests_running", "Requests in the running batch.", stats.num_running)
        yield self._gauge("tandem_num_requests_waiting", "Requests waiting for admission.", stats.num_waiting)
        yield self._gauge(
            "tandem_num_requests_transferring", "Requests whose KV is being handed over.", now.num_transferring
        )
        stale = now.given.stale_blocks + now.taken.stale_blocks
        yield self._counter("tandem_stale_hit_blocks", "Blocks hoped to be cached on a peer, in vain.", stale)
        yield self._counter(
            "tandem_prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.num_prefix_queries
        )
        yield self._counter("tandem_prefix_cache_hits", "Prompt tokens found in the cache.", stats.num_prefix_hits)
        yield self._counter("tandem_num_preemptions", "Requests preempted for want of blocks.", stats.num_preemptions)
        yield self._counter(
            "tandem_computed_tokens",
            "Tokens whose KV was computed here, recomputed ones again.",
            stats.num_computed_tokens,
        )
        yield self._counter("tandem_sampled_tokens", "Tokens sampled here.", stats.num_sampled_tokens)

        yield self._handoffs(now.given, now.taken)
        yield self._staged(now.given, now.taken)
        yield self._counter(
            "tandem_kv_unmappable_pools",
            "Peers' pools that cannot be mapped here: their blocks come through host memory.",
            now.taken.unmappable_pools,
        )

    def _handoffs(self, given: HolderCounters, taken: ConsumerCounters) -> Metric:
        family = CounterMetricFamily(
            "tandem_kv_handoffs", "Hand-offs that ended, by this worker's part in them and by how.",
            labels=(*LABELS, "part", "end"),
        )  # fmt: skip
        for end in HolderEnd:
            family.add_metric((*self._labels, "holder", end.value), given.ends[end])
        family.add_metric((*self._labels, "consumer", "committed"), taken.committed)
        family.add_metric((*self._labels, "consumer", "aborted"), taken.aborted)
        for code in Code:
            if taken.lost[code]:
                family.add_metric((*self._labels, "consumer", f"lost_{code.name.lower()}"), taken.lost[code])
        return family

    def _staged(self, given: HolderCounters, taken: ConsumerCounters) -> Metric:
        family = CounterMetricFamily(
            "tandem_kv_staged_handoffs", "Hand-offs through host memory, by this worker's part in them.",
            labels=(*LABELS, "part"),
        )  # fmt: skip
        family.add_metric((*self._labels, "holder"), given.staged)
        family.add_metric((*self._labels, "consumer"), taken.staged)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

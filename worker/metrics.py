"""A worker's Prometheus metrics: counted in the core, exported here.

The engine and the hand-offs count in plain dataclasses. At a scrape the collector turns the last of them into metric
families, so that nothing is counted twice and a step pays nothing; only histograms are observed as things happen.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.stats import EngineStats
from kvtransfer.stats import TransferStats

LABELS = ("model_name", "worker_id", "role")

# A hand-off's copying, from one small block on a fast link to a long prompt on a slow one.
SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BYTES_BUCKETS = tuple(float(4**exponent) for exponent in range(6, 19))  # 4 KiB to 64 GiB
SEGMENTS_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What there is to tell at a scrape."""

    engine: EngineStats
    transfer: TransferStats
    num_transferring: int


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

        self.transfer_seconds = histogram(
            "tandem_kv_transfer_seconds", "Seconds that the copies of one hand-off took.", SECONDS_BUCKETS
        )
        self.transfer_bytes = histogram("tandem_kv_transfer_bytes", "Bytes copied in one hand-off.", BYTES_BUCKETS)
        self.transfer_segments = histogram(
            "tandem_kv_transfer_segments", "Runs of consecutive blocks copied in one hand-off.", SEGMENTS_BUCKETS
        )

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

        usable = stats.num_free_blocks + stats.num_cached_blocks + stats.num_active_blocks
        yield self._gauge(
            "tandem_kv_cache_usage_perc", "Share of the pool in use by requests (1: full).",
            stats.num_active_blocks / usable if usable else 0.0,
        )  # fmt: skip
        yield self._gauge("tandem_num_requests_running", "Requests in the running batch.", stats.num_running)
        yield self._gauge("tandem_num_requests_waiting", "Requests waiting for admission.", stats.num_waiting)
        yield self._gauge(
            "tandem_num_requests_transferring", "Requests whose KV is being handed over.", now.num_transferring
        )
        yield self._counter(
            "tandem_prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.num_prefix_queries
        )
        yield self._counter("tandem_prefix_cache_hits", "Prompt tokens found in the cache.", stats.num_prefix_hits)
        yield self._counter("tandem_num_preemptions", "Requests preempted for want of blocks.", stats.num_preemptions)
        yield self._counter(
            "tandem_prompt_tokens_computed", "Prompt tokens whose KV was computed here.", stats.num_computed_prompt_tokens
        )
        yield self._counter("tandem_generation_tokens", "Tokens sampled here.", stats.num_generated_tokens)

        events = CounterMetricFamily(
            "tandem_kv_handoff_events", "Hand-offs that did not go straight, by what happened.", labels=(*LABELS, "event")
        )
        for event, count in asdict(now.transfer).items():
            events.add_metric((*self._labels, event), count)
        yield events

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

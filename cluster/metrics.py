"""The gateway's Prometheus metrics, and the workers' beside them.

Latencies as a client feels them are measured here and nowhere else: time to first token begins before tokenizing and
contains routing, queueing, hand-off and every repair. What the generator counts in its plain `GeneratorStats` is read
at a scrape.
"""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.errors import GenerationError
from cluster.generator import GeneratorStats
from cluster.worker_info import Role, WorkerStatus

LABELS = ("model_name", "worker_id", "role")
GATEWAY_ID = "gateway"
ROLE = "gateway"

# vLLM's buckets, so that its dashboards fit.
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


class GatewayMetrics:
    """The registry of one gateway.

    Args:
        stats: called at each scrape.
        workers: called at each scrape.
    """

    def __init__(
        self,
        model_name: str,
        *,
        worker_id: str = GATEWAY_ID,
        stats: Callable[[], GeneratorStats] = GeneratorStats,
        workers: Callable[[], Sequence[WorkerStatus]] = tuple,
    ) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model_name, worker_id, ROLE)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            metric = Histogram(name, text, LABELS, buckets=buckets, registry=self.registry)
            return metric.labels(*self._labels)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, LABELS, registry=self.registry).labels(*self._labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, LABELS, registry=self.registry).labels(*self._labels)

        self.first_token = histogram(
            "tandem_time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token = histogram(
            "tandem_inter_token_latency_seconds", "From one token of a sequence to the next.", INTER_TOKEN_BUCKETS
        )
        self.request_seconds = histogram(
            "tandem_e2e_request_latency_seconds", "From a request's arrival to its last token.", REQUEST_BUCKETS
        )
        self.running = gauge("tandem_num_requests_running", "Requests in the running batch.")
        self.waiting = gauge("tandem_num_requests_waiting", "Requests waiting for admission.")
        self.prompt_tokens = counter("tandem_prompt_tokens", "Prompt tokens of requests that got a first token.")
        self.cached_prompt_tokens = counter(
            "tandem_cached_prompt_tokens", "Of the prompt tokens, those that nobody computed for the request."
        )
        self.generation_tokens = counter("tandem_generation_tokens", "Tokens generated.")
        self._success = Counter(
            "tandem_request_success", "Sequences that ended, by why.", (*LABELS, "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self._failure = Counter(
            "tandem_request_failure", "Sequences that ended in an error, by its kind.", (*LABELS, "error"),
            registry=self.registry,
        )  # fmt: skip
        self.registry.register(_GeneratorCollector(self._labels, stats, workers))

    def sequence(self, num_prompt_tokens: int, arrival_time: float, clock: Callable[[], float]) -> "SequenceTiming":
        """Measures one sequence, for as long as the `with` block lasts."""
        return SequenceTiming(self, num_prompt_tokens, arrival_time, clock)

    def count_end(self, finished_reason: str) -> None:
        self._success.labels(*self._labels, finished_reason).inc()

    def count_error(self, error: str, num_sequences: int = 1) -> None:
        self._failure.labels(*self._labels, error).inc(num_sequences)


class SequenceTiming:
    """One sequence's way through the gateway: waiting until its first token, running until its end."""

    def __init__(
        self, metrics: GatewayMetrics, num_prompt_tokens: int, arrival_time: float, clock: Callable[[], float]
    ) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._arrival_time = arrival_time
        self._clock = clock
        self._last_token_time: float | None = None
        self._is_finished = False

    def __enter__(self) -> Self:
        self._metrics.waiting.inc()
        return self

    def tokens(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Some tokens came."""
        if not num_tokens:
            return
        now = self._clock()
        metrics = self._metrics
        metrics.generation_tokens.inc(num_tokens)
        if self._last_token_time is None:
            metrics.waiting.dec()
            metrics.running.inc()
            metrics.first_token.observe(now - self._arrival_time)
            metrics.prompt_tokens.inc(self._num_prompt_tokens)
            metrics.cached_prompt_tokens.inc(num_cached_tokens)
        else:
            # Tokens that come together share the time since the last ones.
            for _ in range(num_tokens):
                metrics.inter_token.observe((now - self._last_token_time) / num_tokens)
        self._last_token_time = now

    def finished(self, reason: str) -> None:
        """The last token came, or the sequence ended without one."""
        self._is_finished = True
        self._metrics.request_seconds.observe(self._clock() - self._arrival_time)
        self._metrics.count_end(reason)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        (self._metrics.waiting if self._last_token_time is None else self._metrics.running).dec()
        if self._is_finished:
            return
        if exc is None or not isinstance(exc, Exception):  # closed or cancelled: the client left
            self._metrics.count_end("abort")
        else:
            self._metrics.count_error(type(exc).__name__ if isinstance(exc, GenerationError) else "InternalError")


class _GeneratorCollector(Collector):
    """What the generator and the membership know, as they know it at a scrape."""

    def __init__(
        self,
        labels: tuple[str, str, str],
        stats: Callable[[], GeneratorStats],
        workers: Callable[[], Sequence[WorkerStatus]],
    ) -> None:
        self._labels = labels
        self._stats = stats
        self._workers = workers

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in (
            ("tandem_requests_refused", "Requests refused at the gateway's own bound.", stats.queue_full),
            ("tandem_prefill_repairs", "Other prefill workers named for requests in flight.", stats.repairs),
            ("tandem_resubmissions", "Requests moved to another decode worker.", stats.resubmissions),
            ("tandem_local_prefill_fallbacks", "Requests that found no prefill worker.", stats.local_fallbacks),
            ("tandem_stale_prefix_hits", "Requests with fewer tokens cached than planned.", stats.stale_hits),
            ("tandem_planned_cached_tokens", "Prompt tokens that plans found cached.", stats.planned_cached_tokens),
        ):  # fmt: skip
            family = CounterMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

        workers = self._workers()
        count = GaugeMetricFamily(
            "tandem_workers", "Workers that the gateway knows.", labels=(*LABELS, "worker_role", "state")
        )
        for role in Role:
            of_role = [worker for worker in workers if worker.info is not None and worker.info.role is role]
            num_ready = sum(worker.ready for worker in of_role)
            count.add_metric((*self._labels, role.value, "ready"), num_ready)
            count.add_metric((*self._labels, role.value, "lost"), len(of_role) - num_ready)
        count.add_metric((*self._labels, "unknown", "lost"), sum(worker.info is None for worker in workers))
        yield count

        silent = GaugeMetricFamily(
            "tandem_kv_events_silent", "1: the router is blind to this worker's cache.", labels=(*LABELS, "peer")
        )
        blocks = GaugeMetricFamily(
            "tandem_directory_blocks", "Blocks of a worker in the prefix directory.", labels=(*LABELS, "peer")
        )
        for worker in workers:
            if worker.info is not None:
                silent.add_metric((*self._labels, worker.info.worker_id), worker.kv_events_silent)
                blocks.add_metric((*self._labels, worker.info.worker_id), worker.num_directory_blocks)
        yield silent
        yield blocks

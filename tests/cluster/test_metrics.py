"""The gateway's metrics: frozen names, right counts, and one scrape for the whole cluster."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.errors import NoWorker
from cluster.metrics import GatewayMetrics
from cluster.scrape import ClusterScrape, merge_families
from cluster.worker_info import Role
from fake_generator import FakeGenerator, worker_status
from gateway_api import Api, ticking_clock

GOLDEN = Path(__file__).with_name("gateway_metrics.txt")


def series(text: str) -> dict[str, float]:
    """Every series of a scrape; none may come twice."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            assert name not in found, f"{name} comes twice"
            found[name] = float(value)
    return found


def value(text: str, name: str, **labels: str) -> float:
    total = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                total += sample.value
    return total


def test_names_types_and_labels_are_those_of_the_golden_file() -> None:
    metrics = GatewayMetrics("m", workers=lambda: [worker_status()])
    with metrics.sequence(3, 0.0, ticking_clock()) as timing:
        timing.tokens(1, 0)
        timing.finished("stop")
    metrics.count_error("NoWorker")
    lines = []
    for family in metrics.registry.collect():
        labels = sorted({key for sample in family.samples for key in sample.labels} - {"le"})
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"{name} {family.type} {' '.join(labels)}")
    assert "\n".join(sorted(lines)) + "\n" == GOLDEN.read_text()


def test_buckets_are_vllms() -> None:
    text = generate_latest(GatewayMetrics("m").registry).decode()
    first = [s for s in series(text) if s.startswith("tandem_time_to_first_token_seconds_bucket")]
    assert len(first) == 23
    between = [s for s in series(text) if s.startswith("tandem_inter_token_latency_seconds_bucket")]
    assert len(between) == 20
    assert any('le="0.001"' in s for s in first)
    assert any('le="2560.0"' in s for s in first)
    assert any('le="80.0"' in s for s in between)


def test_latencies_are_between_arrival_and_tokens() -> None:
    now = 10.0
    metrics = GatewayMetrics("m")

    def scrape() -> str:
        return generate_latest(metrics.registry).decode()

    with metrics.sequence(7, 8.0, lambda: now) as timing:
        assert value(scrape(), "tandem_num_requests_waiting") == 1
        timing.tokens(0, 0)
        assert value(scrape(), "tandem_num_requests_waiting") == 1
        timing.tokens(1, 4)
        assert value(scrape(), "tandem_num_requests_waiting") == 0
        assert value(scrape(), "tandem_num_requests_running") == 1
        now = 13.0
        timing.tokens(3, 4)
        timing.finished("length")
    text = scrape()
    assert value(text, "tandem_num_requests_running") == 0
    assert value(text, "tandem_time_to_first_token_seconds_sum") == 2.0
    assert value(text, "tandem_inter_token_latency_seconds_count") == 3
    assert value(text, "tandem_inter_token_latency_seconds_sum") == 3.0
    assert value(text, "tandem_e2e_request_latency_seconds_sum") == 5.0
    assert value(text, "tandem_generation_tokens_total") == 4
    assert value(text, "tandem_prompt_tokens_total") == 7
    assert value(text, "tandem_cached_prompt_tokens_total") == 4
    assert value(text, "tandem_request_success_total", finished_reason="length", role="gateway") == 1


def fail_after(metrics: GatewayMetrics, tokens: int, error: BaseException) -> None:
    with metrics.sequence(1, 0.0, ticking_clock()) as timing:
        timing.tokens(tokens, 0)
        raise error


@pytest.mark.parametrize("tokens", [0, 1])
def test_sequence_that_fails_or_is_left_returns_its_gauge(tokens: int) -> None:
    metrics = GatewayMetrics("m")
    for error in (NoWorker("none"), GeneratorExit(), RuntimeError("x")):
        with pytest.raises(type(error)):
            fail_after(metrics, tokens, error)
    text = generate_latest(metrics.registry).decode()
    assert value(text, "tandem_num_requests_running") == value(text, "tandem_num_requests_waiting") == 0
    assert value(text, "tandem_request_failure_total", error="NoWorker") == 1
    assert value(text, "tandem_request_failure_total", error="InternalError") == 1
    assert value(text, "tandem_request_success_total", finished_reason="abort") == 1


async def test_requests_are_counted_by_how_they_end() -> None:
    api = Api(FakeGenerator(num_cached_tokens=1))
    await api.complete("Once upon", max_tokens=4, n=2)
    await api.complete([-1])
    text = (await api.http.get("/metrics?scope=gateway")).text
    assert value(text, "tandem_request_success_total", finished_reason="length", model_name="fake") == 2
    assert value(text, "tandem_generation_tokens_total") == 8
    assert value(text, "tandem_num_requests_running") == 0


async def test_generators_own_counts_are_exported() -> None:
    api = Api()
    api.generator.stats.repairs = 3
    api.generator.stats.resubmissions = 2
    api.generator.stats.local_fallbacks = 5
    text = api.server_metrics()
    assert value(text, "tandem_prefill_repairs_total") == 3
    assert value(text, "tandem_resubmissions_total") == 2
    assert value(text, "tandem_local_prefill_fallbacks_total") == 5
    assert value(text, "tandem_workers", worker_role="decode", state="ready") == 1


# --- the whole cluster


def worker_metrics(worker_id: str, requests: int) -> str:
    registry = CollectorRegistry()
    labels = ("model_name", "worker_id", "role")
    values = ("fake", worker_id, "decode")
    Gauge("tandem_num_requests_running", "Requests.", labels, registry=registry).labels(*values).set(requests)
    Counter("tandem_num_preemptions", "Preempted.", labels, registry=registry).labels(*values).inc(requests)
    Histogram("tandem_kv_transfer_seconds", "S.", labels, registry=registry).labels(*values).observe(requests)
    return generate_latest(registry).decode()


class Workers:
    """The workers' metrics endpoints, by address."""

    def __init__(self, replies: dict[str, Any]) -> None:
        self._replies = replies

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        reply = self._replies[request.url.netloc.decode()]
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, httpx.Response) else httpx.Response(200, text=reply)


def status_with_metrics(worker_id: str, address: str) -> Any:
    status = worker_status(worker_id, Role.DECODE)
    assert status.info is not None
    return replace(status, info=replace(status.info, metrics_address=address))


async def test_scrape_of_the_cluster_holds_every_series_once() -> None:
    api = Api()
    api.generator.statuses = [status_with_metrics(f"d{i}", f"w:{i}") for i in range(2)]
    workers = Workers({f"w:{i}": worker_metrics(f"d{i}", i + 1) for i in range(2)})
    api = Api(api.generator, scrape=ClusterScrape(api.metrics.registry, workers.client()))
    reply = await api.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    found = series(reply.text)
    assert reply.text.count("# TYPE tandem_num_requests_running gauge") == 1
    for i in range(2):
        assert value(reply.text, "tandem_num_requests_running", worker_id=f"d{i}") == i + 1
        assert value(reply.text, "tandem_num_preemptions_total", worker_id=f"d{i}") == i + 1
        assert value(reply.text, "tandem_kv_transfer_seconds_count", worker_id=f"d{i}") == 1
        assert value(reply.text, "tandem_workers_scraped", worker_id=f"d{i}") == 1
    assert any('role="gateway"' in name for name in found)
    assert not any("_created" in name for name in found)


@pytest.mark.parametrize(
    "reply",
    [httpx.ConnectError("gone"), httpx.ReadTimeout("late"), httpx.Response(500), "not { metrics"],
    ids=["gone", "late", "broken", "nonsense"],
)
async def test_worker_that_does_not_answer_is_left_out_and_told(reply: Any) -> None:
    registry = GatewayMetrics("m").registry
    workers = Workers({"w:0": worker_metrics("d0", 1), "w:1": reply})
    statuses = [status_with_metrics("d0", "w:0"), status_with_metrics("d1", "w:1")]
    text = (await ClusterScrape(registry, workers.client()).cluster(statuses)).decode()
    assert value(text, "tandem_workers_scraped", worker_id="d0") == 1
    assert value(text, "tandem_workers_scraped", worker_id="d1") == 0
    assert "tandem_workers_scraped" in text
    assert value(text, "tandem_num_requests_running", worker_id="d0") == 1


def test_two_sources_of_one_series_are_told_once() -> None:
    families = list(text_string_to_metric_families(worker_metrics("d0", 1)))
    again = list(text_string_to_metric_families(worker_metrics("d0", 9)))
    merged = {family.name: family for family in merge_families([families, again])}
    assert [sample.value for sample in merged["tandem_num_requests_running"].samples] == [1.0]


async def test_targets_are_prometheus_service_discovery() -> None:
    api = Api()
    api.generator.statuses = [status_with_metrics("d0", "host:1"), worker_status("p0", Role.PREFILL)]
    targets = (await api.http.get("/metrics/targets")).json()
    assert targets == [{"targets": ["host:1"], "labels": {"worker_id": "d0", "role": "decode"}}]
    assert json.dumps(targets)

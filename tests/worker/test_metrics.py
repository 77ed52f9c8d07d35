"""A worker's own /metrics, as Prometheus scrapes it."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from decode_worker import DecodeWorker
from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from gateway_end import GatewayEnd
from prefill_worker import PrefillWorker
from tandem.v1 import worker_pb2 as pb
from worker.config import WorkerConfig

GOLDEN = Path(__file__).with_name("worker_metrics.txt")
ENGINE = EngineConfig(num_blocks=33, max_model_len=512)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[str, str]]:
    prefill = PrefillWorker(WorkerConfig(engine=ENGINE, worker_id="p0", executor="hash", served_model_name="m"))
    decode = DecodeWorker(WorkerConfig(engine=ENGINE, worker_id="d0", executor="hash", served_model_name="m"))
    yield await prefill.start(), await decode.start()
    await decode.stop()
    await prefill.stop()


def fetch(address: str) -> str:
    with urlopen(f"http://{address}/metrics") as reply:
        return str(reply.read().decode())


async def scrape(address: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(await asyncio.to_thread(fetch, address)):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"{sample} twice"
            samples[key] = sample.value
    return samples


async def test_names_types_and_labels_are_those_of_the_golden_file(pair: tuple[str, str]) -> None:
    async with GatewayEnd(pair[1]) as gateway:
        address = (await gateway.stub.Describe(pb.DescribeRequest())).metrics_address
    found = set()
    for family in text_string_to_metric_families(await asyncio.to_thread(fetch, address)):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            name = re.sub("_(bucket|sum|count)$", "", sample.name) if family.type == "histogram" else sample.name
            found.add(f"{name} {family.type} {' '.join(sorted(sample.labels.keys() - {'le'}))}")
    assert sorted(found) == GOLDEN.read_text().splitlines()


async def test_a_handed_over_request_is_counted_on_both_sides(pair: tuple[str, str]) -> None:
    addresses = {}
    async with GatewayEnd(pair[0]) as of_prefill, GatewayEnd(pair[1]) as gateway:
        for end, role in ((of_prefill, "prefill"), (gateway, "decode")):
            addresses[role] = (await end.stub.Describe(pb.DescribeRequest())).metrics_address
        for turn in range(2):
            seen = await gateway.submit(
                f"r{turn}", range(100), SamplingParams(max_tokens=5, temperature=0.0), prefill=("p0", pair[0])
            )
            await gateway.until(lambda seen=seen: seen.is_over)
            await gateway.until(lambda: not gateway.load.num_active_blocks)

        def labels(role: str, **more: str) -> frozenset[tuple[str, str]]:
            worker_id = {"prefill": "p0", "decode": "d0"}[role]
            return frozenset({"model_name": "m", "worker_id": worker_id, "role": role, **more}.items())

        scraped = {role: await scrape(address) for role, address in addresses.items()}
        for role, now in scraped.items():
            blocks = [now["tandem_kv_blocks", labels(role, state=s)] for s in ("free", "cached", "active")]
            assert sum(blocks) == 32
            assert blocks[1] == 6
            assert now["tandem_kv_cache_usage_perc", labels(role)] == blocks[2] / 32
            for state in ("running", "waiting", "transferring"):
                assert now[f"tandem_num_requests_{state}", labels(role)] == 0
            assert now["tandem_prefix_cache_queries_total", labels(role)] == 200
            assert now["tandem_prefix_cache_hits_total", labels(role)] == 96
            assert now["tandem_num_preemptions_total", labels(role)] == 0
        decode, prefill = scraped["decode"], scraped["prefill"]
        assert decode["tandem_kv_handoffs_total", labels("decode", part="consumer", end="committed")] == 2
        assert prefill["tandem_kv_handoffs_total", labels("prefill", part="holder", end="done")] == 2
        assert decode["tandem_kv_transfer_seconds_count", labels("decode")] == 2
        # All seven blocks at first; then the six full ones are cached on both sides.
        assert decode["tandem_kv_transfer_bytes_sum", labels("decode")] == (7 + 1) * 16 * 8
        assert decode["tandem_kv_transfer_segments_count", labels("decode")] == 2

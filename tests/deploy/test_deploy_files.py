"""The files under deploy/: that the programs they are for would take them."""

import json
import re
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.config import load_config
from decode_worker import DecodeWorker
from engine.config import EngineConfig
from tandem.v1 import worker_pb2, worker_pb2_grpc
from worker.config import WorkerConfig

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.mark.parametrize("name", ["onprem", "onprem-gpu", "aws"])
def test_ray_takes_the_cluster(name: str) -> None:
    prepared = prepare_config(yaml.safe_load((DEPLOY / "ray" / f"{name}.yaml").read_text()))
    validate_config(prepared)
    assert prepared["head_node_type"] in prepared["available_node_types"]
    # Every machine gets Tandem, and starts Ray out of its environment.
    for kind in ("head", "worker"):
        assert any("--editable" in command for command in prepared[f"{kind}_setup_commands"])
        assert any("~/tandem/.venv/bin/ray start" in command for command in prepared[f"{kind}_start_ray_commands"])


def test_gpu_machines_get_the_packages_and_the_compilers_for_gpus() -> None:
    cpu, gpu = (yaml.safe_load((DEPLOY / "ray" / f"{name}.yaml").read_text()) for name in ("onprem", "onprem-gpu"))
    different = {key for key in cpu | gpu if cpu.get(key) != gpu.get(key)}
    assert different == {
        "cluster_name", "setup_commands", "head_start_ray_commands", "worker_start_ray_commands",
    }  # fmt: skip
    (install,) = (command for command in gpu["setup_commands"] if "--editable" in command)
    assert "'.[gpu]'" in install
    # What the extra and the constraints both pin could not be installed.
    assert re.search("^torch==", (DEPLOY.parent / "constraints.txt").read_text(), re.MULTILINE)
    assert gpu["setup_commands"].index("grep -v '^torch==' ~/tandem/constraints.txt > ~/tandem-constraints.txt") < gpu[
        "setup_commands"
    ].index(install)
    for kind in ("head", "worker"):
        start = gpu[f"{kind}_start_ray_commands"][-1]
        assert start.startswith("PATH=$HOME/tandem/.venv/bin:/usr/local/cuda/bin:$PATH ")


def test_ray_takes_the_containers_that_the_readme_names() -> None:
    (section,) = re.findall(r"```yaml\n(docker:.*?)```", (DEPLOY / "README.md").read_text(), re.DOTALL)
    docker = yaml.safe_load(section)["docker"]
    assert {"--gpus all", "--pid=host", "--ipc=host"} <= set(docker["run_options"])
    config = yaml.safe_load((DEPLOY / "ray" / "onprem-gpu.yaml").read_text())
    validate_config(prepare_config(config | {"docker": docker}))


def test_schema_would_refuse_a_slip() -> None:
    config = yaml.safe_load((DEPLOY / "ray" / "onprem.yaml").read_text())
    config["head_start_ray_command"] = config.pop("head_start_ray_commands")
    with pytest.raises(Exception, match="head_start_ray_command"):
        validate_config(prepare_config(config))


def test_example_configuration_is_allowed_and_says_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    example, defaults = load_config(DEPLOY / "tandem.yaml"), load_config()
    assert example.model_dump() == defaults.model_dump() | {
        "served_model_name": defaults.model_name,
        "grpc_port": defaults.grpc_listen_port,
    }


def test_prometheus_scrapes_the_default_gateway_and_the_workers_it_names() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    gateway, workers = config["scrape_configs"]
    address = "{0.host}:{0.port}".format(load_config(None, {"ray_address": "local"}))
    assert gateway["static_configs"] == [{"targets": [address]}]
    assert (gateway["metrics_path"], gateway["params"]) == ("/metrics", {"scope": ["gateway"]})
    assert workers["http_sd_configs"][0]["url"] == f"http://{address}/metrics/targets"


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DEPLOY / "grafana" / "tandem.json").read_text())
    return content


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in dashboard()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def shown_series() -> set[str]:
    return set(re.findall(r"tandem_\w+", json.dumps([panel["targets"] for panel in dashboard()["panels"]])))


async def test_dashboard_shows_only_what_is_exported() -> None:
    golden = (DEPLOY.parent / "tests" / "cluster" / "gateway_metrics.txt").read_text()
    exported = {line.split()[0] for line in golden.splitlines()}
    worker = DecodeWorker(WorkerConfig(EngineConfig(num_blocks=9, max_model_len=64), executor="hash"))
    address = await worker.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            described = await worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest())
        async with httpx.AsyncClient(trust_env=False) as client:
            scraped = await client.get(f"http://{described.metrics_address}/metrics")
    finally:
        await worker.stop()
    exported |= set(re.findall(r"^tandem_\w+", scraped.text, re.MULTILINE))

    assert len(shown_series()) > 10
    unknown = {name for name in shown_series() if not {name, re.sub("_(bucket|sum|count)$", "", name)} & exported}
    assert not unknown

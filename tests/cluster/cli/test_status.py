"""`tandem status`, out of a scrape."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from cluster.cli.app import app

SCRAPE = """\
# TYPE tandem_kv_blocks gauge
tandem_kv_blocks{model_name="m",role="prefill",state="free",worker_id="prefill-0"} 70.0
tandem_kv_blocks{model_name="m",role="prefill",state="cached",worker_id="prefill-0"} 20.0
tandem_kv_blocks{model_name="m",role="prefill",state="active",worker_id="prefill-0"} 10.0
tandem_kv_blocks{model_name="m",role="decode",state="free",worker_id="decode-0"} 100.0
tandem_kv_blocks{model_name="m",role="decode",state="cached",worker_id="decode-0"} 0.0
tandem_kv_blocks{model_name="m",role="decode",state="active",worker_id="decode-0"} 0.0
# TYPE tandem_num_requests_running gauge
tandem_num_requests_running{model_name="m",role="prefill",worker_id="prefill-0"} 2.0
tandem_num_requests_running{model_name="m",role="gateway",worker_id="gateway"} 2.0
# TYPE tandem_prefix_cache_queries counter
tandem_prefix_cache_queries_total{model_name="m",role="prefill",worker_id="prefill-0"} 400.0
# TYPE tandem_prefix_cache_hits counter
tandem_prefix_cache_hits_total{model_name="m",role="prefill",worker_id="prefill-0"} 100.0
# TYPE python_info gauge
python_info{worker_id="prefill-0"} 1.0
"""


def status(server: Any, *args: str) -> Result:
    return CliRunner().invoke(app, ["status", "--base-url", server.base_url, *args], env={"COLUMNS": "80"})


def test_workers_are_shown_with_blocks_and_hit_rate(server: Any) -> None:
    server.metrics = SCRAPE
    result = status(server, "--json")
    assert result.exit_code == 0, result.output
    decode, prefill = json.loads(result.stdout)["workers"]
    assert (prefill["worker_id"], prefill["running"], prefill["active_blocks"]) == ("prefill-0", 2, 10)
    assert (prefill["prefix_hits"], prefill["prefix_queries"]) == (100, 400)
    assert (decode["worker_id"], decode["free_blocks"], decode["prefix_queries"]) == ("decode-0", 100, 0)


def test_table_says_who_is_how_busy(server: Any) -> None:
    server.metrics = SCRAPE
    rows = {line.split()[0]: line.split()[1:] for line in status(server).stdout.splitlines() if "-0" in line}
    assert rows["prefill-0"] == ["2", "0", "0", "70", "20", "10", "10%", "25%", "0"]
    assert rows["decode-0"] == ["0", "0", "0", "100", "0", "0", "0%", "–", "0"]


def test_cluster_that_is_not_ready_says_so(server: Any) -> None:
    server.metrics, server.ready = "", False
    assert json.loads(status(server, "--json").stdout) == {"ready": False, "workers": []}
    assert "not ready" in status(server).stdout


def test_server_without_metrics_is_one_sentence(server: Any) -> None:
    result = status(server)
    assert result.exit_code == 1
    assert "has no metrics (status 404); is it a Tandem gateway?" in result.stderr


def test_nobody_there_is_one_sentence(nobody: str) -> None:
    result = CliRunner().invoke(app, ["status", "--base-url", nobody])
    assert (result.exit_code, result.stderr) == (
        1,
        f"tandem: nothing answers at {nobody}; is a server running there?\n",
    )

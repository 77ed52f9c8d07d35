"""A whole cluster, as far as it comes without Ray: what is refused before anything starts."""

import re
import socket
from pathlib import Path

import pytest

from cluster.cli.serving import Serving
from cluster.config import ClusterConfig, ConfigError
from cluster.worker_plan import plan_workers


def serving(**values: object) -> Serving:
    config = ClusterConfig.model_validate({"ray_address": "local", "port": 0, **values})

    def ray_started() -> None:
        raise AssertionError("Ray was started")

    return Serving(config, plan_workers(config), on_ray_started=ray_started)


@pytest.mark.parametrize(
    ("http_is_taken", "grpc_is_taken", "named"),
    [(True, True, "HTTP"), (True, False, "HTTP"), (False, True, "gRPC")],
)
async def test_port_in_use_is_named_with_its_host_http_first(
    http_is_taken: bool, grpc_is_taken: bool, named: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = {
            "port": one.getsockname()[1] if http_is_taken else 0,
            "grpc_port": other.getsockname()[1] if grpc_is_taken else 0,
        }
        port = ports["port" if named == "HTTP" else "grpc_port"]
        message = f"cannot listen on port {port} of 127.0.0.1 for {named}: Address already in use"
        with pytest.raises(OSError, match=f"{re.escape(message)}$"):
            await serving(**ports).start()


async def test_host_that_is_not_this_machines_is_named() -> None:
    # 192.0.2.0/24 is kept for documentation: nobody has it.
    with pytest.raises(OSError, match=r"cannot listen on port 0 of 192\.0\.2\.1 for HTTP: Cannot assign .* address$"):
        await serving(host="192.0.2.1").start()


def test_file_that_is_no_good_is_refused_before_anything_starts(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    for names in (
        ("api_keys_file",),
        ("tls_cert_file", "tls_key_file"),
        ("internal_ca_file", "internal_cert_file", "internal_key_file"),
    ):
        with pytest.raises(ConfigError, match=f"{names[0]}: {missing} cannot be read: No such file"):
            serving(**dict.fromkeys(names, missing))

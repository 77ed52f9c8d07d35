"""Certificates: files that are no good are named, and whoever has no right one is refused."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from certificates import Authority
from cluster.channel import ChannelConfig, open_channel
from cluster.config import ConfigError, load_config
from cluster.tls import gateway_tls, internal_tls
from decode_worker import DecodeWorker
from engine.config import EngineConfig
from kvtransfer.peer_tls import PeerTls
from tandem.v1 import worker_pb2, worker_pb2_grpc
from worker.config import DEFAULT_SERVER_NAME, WorkerConfig

# Never reached unless something hangs.
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "stranger")


def internal(ca_file: str, files: tuple[str, str]) -> dict[str, str]:
    return {"internal_ca_file": ca_file, "internal_cert_file": files[0], "internal_key_file": files[1]}


# --- files


def test_gateways_files_are_read_and_kept_out_of_sight(authority: Authority) -> None:
    cert_file, key_file = authority.sign("localhost")
    tls = gateway_tls(load_config(None, {"tls_cert_file": cert_file, "tls_key_file": key_file}))
    assert tls is not None
    assert (tls.certificate, tls.private_key) == (Path(cert_file).read_bytes(), Path(key_file).read_bytes())
    assert "BEGIN" not in repr(tls)
    assert gateway_tls(load_config()) is None


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"tls_cert_file": "a"}, "tls_key_file: needed beside tls_cert_file"),
        ({"tls_key_file": "a"}, "tls_cert_file: needed beside tls_key_file"),
        ({"internal_ca_file": "a"}, "internal_cert_file, internal_key_file: needed beside internal_ca_file"),
        (
            {"internal_cert_file": "a", "internal_key_file": "b"},
            "internal_ca_file: needed beside internal_cert_file, internal_key_file",
        ),
        (
            {"internal_server_name": "a"},
            "internal_server_name: needs internal_ca_file, internal_cert_file, internal_key_file",
        ),
    ],
)
def test_half_a_set_of_files_is_refused(given: dict[str, str], missing: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, given)
    assert caught.value.problems == (missing,)


def test_key_of_another_certificate_is_refused(authority: Authority) -> None:
    (cert_file, _), (_, other_key) = authority.sign("localhost"), authority.sign("another")
    with pytest.raises(ConfigError, match=r"tls_cert_file, tls_key_file: .*key values mismatch"):
        gateway_tls(load_config(None, {"tls_cert_file": cert_file, "tls_key_file": other_key}))


def test_key_with_a_password_is_refused_and_nobody_is_asked_for_it(authority: Authority) -> None:
    cert_file, key_file = authority.sign("locked", password=b"secret")
    with pytest.raises(ConfigError, match="without a password"):
        gateway_tls(load_config(None, {"tls_cert_file": cert_file, "tls_key_file": key_file}))
    with pytest.raises(ConfigError, match="without a password"):
        internal_tls(load_config(None, internal(authority.file, (cert_file, key_file))))


def test_missing_file_is_named(authority: Authority, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    cert_file, key_file = authority.sign(DEFAULT_SERVER_NAME)
    with pytest.raises(ConfigError, match=f"tls_key_file: {missing} cannot be read: No such file"):
        gateway_tls(load_config(None, {"tls_cert_file": cert_file, "tls_key_file": missing}))
    with pytest.raises(ConfigError, match=f"internal_ca_file: {missing} cannot be read: No such file"):
        internal_tls(load_config(None, internal(missing, (cert_file, key_file))))


def test_internal_files_are_tried_on_each_other(authority: Authority, stranger: Authority) -> None:
    right = authority.sign(DEFAULT_SERVER_NAME)
    tls = internal_tls(load_config(None, internal(authority.file, right)))
    assert tls is not None
    assert "BEGIN" not in repr(tls)
    assert internal_tls(load_config()) is None
    for files, reason in (
        (authority.sign("another-name"), "Hostname mismatch"),
        (stranger.sign(DEFAULT_SERVER_NAME), "unable to get local issuer certificate"),
        (authority.sign(DEFAULT_SERVER_NAME, days=-1), "certificate has expired"),
    ):
        with pytest.raises(ConfigError, match=f"internal_cert_file: .* would be refused by the others: .*{reason}"):
            internal_tls(load_config(None, internal(authority.file, files)))
    with pytest.raises(ConfigError, match="no authority, certificate and key"):
        internal_tls(load_config(None, internal(right[1], right)))


def test_other_server_name_is_taken_if_certificates_are_for_it(authority: Authority) -> None:
    files = internal(authority.file, authority.sign("blocks.example"))
    assert internal_tls(load_config(None, files | {"internal_server_name": "blocks.example"})) is not None


# --- workers


@asynccontextmanager
async def worker(authority: Authority | None) -> AsyncIterator[str]:
    files = {} if authority is None else internal(authority.file, authority.sign(DEFAULT_SERVER_NAME))
    engine = EngineConfig(num_blocks=9, max_model_len=64)
    worker = DecodeWorker(WorkerConfig(engine=engine, executor="hash", **files))  # type: ignore[arg-type]
    address = await worker.start()
    try:
        yield address
    finally:
        await worker.stop()


def shown(authority: Authority, files: tuple[str, str], believed: Authority | None = None) -> ChannelConfig:
    contents = [Path(file).read_bytes() for file in ((believed or authority).file, *files)]
    return ChannelConfig(tls=PeerTls(*contents, server_name=DEFAULT_SERVER_NAME))


async def describe(channel: grpc.aio.Channel) -> worker_pb2.DescribeResponse:
    async with channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        return await stub.Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S)


async def refused(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await describe(channel)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # at once, not after its time


async def test_worker_serves_who_shows_a_certificate_of_the_authority(authority: Authority) -> None:
    async with worker(authority) as address:
        config = shown(authority, authority.sign(DEFAULT_SERVER_NAME))
        assert (await describe(open_channel(address, config))).worker_id == "worker-0"


async def test_worker_with_certificates_refuses_everybody_else(authority: Authority, stranger: Authority) -> None:
    async with worker(authority) as address:
        await refused(grpc.aio.insecure_channel(address))
        anonymous = grpc.ssl_channel_credentials(Path(authority.file).read_bytes())
        options = (("grpc.ssl_target_name_override", DEFAULT_SERVER_NAME),)
        await refused(grpc.aio.secure_channel(address, anonymous, options))
        # Neither service of the worker, nor health or reflection, is left open.
        async with grpc.aio.secure_channel(address, anonymous, options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        of_stranger = stranger.sign(DEFAULT_SERVER_NAME)
        await refused(open_channel(address, shown(stranger, of_stranger, believed=authority)))


async def test_client_refuses_a_worker_of_another_authority_or_name_or_none(
    authority: Authority, stranger: Authority
) -> None:
    ours = shown(authority, authority.sign(DEFAULT_SERVER_NAME))
    async with worker(stranger) as address:
        await refused(open_channel(address, ours))
    async with worker(None) as address:
        await refused(open_channel(address, ours))
    async with worker(authority) as address:
        assert ours.tls is not None
        other_name = PeerTls(ours.tls.authority, ours.tls.certificate, ours.tls.private_key, "another-name")
        await refused(open_channel(address, ChannelConfig(tls=other_name)))


async def test_worker_with_a_bad_certificate_does_not_start(authority: Authority) -> None:
    files = internal(authority.file, authority.sign("another-name"))
    config = WorkerConfig(engine=EngineConfig(num_blocks=9, max_model_len=64), executor="hash", **files)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Hostname mismatch"):
        await DecodeWorker(config).start()

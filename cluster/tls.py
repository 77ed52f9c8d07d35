"""Certificates: the gateway's own, for clients, and the ones by which gateway and workers know each other.

Files are read once, at the start, and tried before anything else is done; new ones are taken at the next start.
"""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from cluster.config import ClusterConfig, ConfigError
from kvtransfer.peer_tls import PeerTls


@dataclass(frozen=True, slots=True)
class GatewayTls:
    """What the gateway shows its clients."""

    cert_file: str
    key_file: str
    certificate: bytes = field(repr=False)
    private_key: bytes = field(repr=False)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self.private_key, self.certificate)])


def gateway_tls(config: ClusterConfig) -> GatewayTls | None:
    """None: HTTP and gRPC are plain.

    Raises:
        ConfigError: a file cannot be read, or certificate and key do not belong together.
    """
    cert_file, key_file = config.tls_cert_file, config.tls_key_file
    if cert_file is None or key_file is None:
        return None
    certificate, private_key = _read("tls_cert_file", cert_file), _read("tls_key_file", key_file)
    try:
        # A password would be asked for at a terminal that need not be there.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, password=lambda: "")
    except ssl.SSLError as exc:
        reason = exc.reason.replace("_", " ").lower() if exc.reason else str(exc)
        raise ConfigError(
            f"tls_cert_file, tls_key_file: {cert_file} and {key_file} are no certificate and its key "
            f"without a password: {reason}"
        ) from exc
    return GatewayTls(cert_file, key_file, certificate, private_key)


def internal_tls(config: ClusterConfig) -> PeerTls | None:
    """What the gateway shows workers; None: connections to them are plain.

    Raises:
        ConfigError: the files are no good.
    """
    ca_file, cert_file, key_file = config.internal_ca_file, config.internal_cert_file, config.internal_key_file
    if ca_file is None or cert_file is None or key_file is None:
        return None
    try:
        return PeerTls.load(ca_file, cert_file, key_file, config.internal_server_name)
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc


def _read(name: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as exc:
        raise ConfigError(f"{name}: {file} cannot be read: {exc.strerror}") from exc

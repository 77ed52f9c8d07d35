"""Mutual TLS between the processes of a cluster: gateway and workers, worker and worker.

One authority signs for all of them, and for nobody else. Whoever listens wants a certificate of it; whoever connects
shows one, and wants the other's to be for one name that all share, so that an address may be any, an IP as well.
Without it everything inside is plain: fine on one machine, or in a network of its own.
"""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvtransfer.channels import Options

Server = grpc.aio.Server


@dataclass(frozen=True, slots=True)
class PeerTls:
    """What a process shows and whom it believes; contents of PEM files, kept out of its repr."""

    authority: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    private_key: bytes = field(repr=False)
    server_name: str

    @classmethod
    def load(cls, ca_file: str, cert_file: str, key_file: str, server_name: str) -> "PeerTls":
        """Reads the files, and lets them prove that they would do: a handshake with themselves, in memory.

        Raises:
            ValueError: a file cannot be read, or the certificate is not of that authority, not of that key, not for
                that name, or out of date; the message says which.
        """
        files = {"internal_ca_file": ca_file, "internal_cert_file": cert_file, "internal_key_file": key_file}
        authority, certificate, private_key = (_read(name, file) for name, file in files.items())
        try:
            server, client = (_context(side, ca_file, cert_file, key_file) for side in _SIDES)
        except ssl.SSLError as exc:
            raise ValueError(
                f"{', '.join(files)}: no authority, certificate and key without a password: {exc}"
            ) from exc
        try:
            _shake_hands(server, client, server_name)
        except ssl.SSLCertVerificationError as exc:
            raise ValueError(
                f"internal_cert_file: {cert_file} would be refused by the others: {exc.verify_message}"
            ) from exc
        except ssl.SSLError as exc:
            raise ValueError(f"internal_cert_file: {cert_file} cannot be used: {exc}") from exc
        return cls(authority, certificate, private_key, server_name)


def open_peer_channel(address: str, options: Options, tls: PeerTls | None) -> grpc.aio.Channel:
    """A channel to a process of the cluster; it connects when it is first used."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(tls.authority, tls.private_key, tls.certificate)
    named = [*options, ("grpc.ssl_target_name_override", tls.server_name)]
    return grpc.aio.secure_channel(address, credentials, options=named)


def add_peer_port(server: Server, address: str, tls: PeerTls | None) -> int:
    """Makes `server` listen at `address` for processes of the cluster; returns the port.

    Raises:
        OSError: the address cannot be had.
    """
    try:
        if tls is None:
            return server.add_insecure_port(address)
        credentials = grpc.ssl_server_credentials(
            [(tls.private_key, tls.certificate)], tls.authority, require_client_auth=True
        )
        return server.add_secure_port(address, credentials)
    except RuntimeError as exc:
        raise OSError(f"cannot listen on {address}: {exc}") from exc


_SIDES = (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)


def _read(name: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as exc:
        raise ValueError(f"{name}: {file} cannot be read: {exc.strerror}") from exc


def _context(side: int, ca_file: str, cert_file: str, key_file: str) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(ca_file)
    # A password would be asked for at a terminal that need not be there.
    context.load_cert_chain(cert_file, key_file, password=lambda: "")
    return context


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, server_name: str) -> None:
    """Both ends in memory, in turn, until both are content."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    waiting = [
        client.wrap_bio(to_client, to_server, server_hostname=server_name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while waiting:
        for end in tuple(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                pass  # the other's turn

"""The gateway's gRPC channels to workers: one for each connection that is tried."""

from dataclasses import dataclass

import grpc

from kvtransfer.channels import CHANNEL_OPTIONS
from kvtransfer.peer_tls import PeerTls, open_peer_channel


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    """How a worker is connected to, and the death of one that does not even close its connection noticed (seconds)."""

    keepalive_s: float = 2.0  # a ping after so long without traffic
    keepalive_timeout_s: float = 4.0  # dead after so long without an answer: with the above, three missed
    tls: PeerTls | None = None  # None: plain


def open_channel(address: str, config: ChannelConfig) -> grpc.aio.Channel:
    """A channel to `address`; connects when it is first used."""
    options = dict(CHANNEL_OPTIONS) | {
        "grpc.keepalive_time_ms": round(config.keepalive_s * 1000),
        # The second ends a ping without an answer; the first alone would wait a minute for it.
        "grpc.keepalive_timeout_ms": round(config.keepalive_timeout_s * 1000),
        "grpc.http2.ping_timeout_ms": round(config.keepalive_timeout_s * 1000),
    }
    return open_peer_channel(address, list(options.items()), config.tls)


def describe_failure(error: grpc.aio.AioRpcError) -> str:
    """A failed call in words."""
    return f"{error.details() or 'no details'} ({error.code().name})"

"""The gateway's gRPC channels to workers: one for each connection that is tried."""

from dataclasses import dataclass

import grpc

from kvtransfer.channels import CHANNEL_OPTIONS


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    """How the death of a peer that does not even close its connection is noticed; in seconds."""

    keepalive_s: float = 2.0  # a ping after so long without traffic
    keepalive_timeout_s: float = 4.0  # dead after so long without an answer: with the above, three missed


def open_channel(address: str, config: ChannelConfig) -> grpc.aio.Channel:
    """A channel to `address`; connects when it is first used."""
    options = dict(CHANNEL_OPTIONS) | {
        "grpc.keepalive_time_ms": round(config.keepalive_s * 1000),
        # The second ends a ping without an answer; the first alone would wait a minute for it.
        "grpc.keepalive_timeout_ms": round(config.keepalive_timeout_s * 1000),
        "grpc.http2.ping_timeout_ms": round(config.keepalive_timeout_s * 1000),
    }
    return grpc.aio.insecure_channel(address, options=tuple(options.items()))


def describe_failure(error: grpc.aio.AioRpcError) -> str:
    """A failed call in words."""
    return f"{error.details() or 'no details'} ({error.code().name})"

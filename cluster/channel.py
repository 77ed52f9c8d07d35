"""The gateway's gRPC channels to workers: one for each connection that is tried, and how its death is noticed.

A peer that vanishes without closing its connection is found by pings: one after `keepalive_s` without traffic, and the
connection is dead when nothing is heard for `keepalive_timeout_s` more. Servers must allow such pings
(`grpc.http2.min_recv_ping_interval_without_data_ms`), or they hang up on a client that pings "too often".
"""

from dataclasses import dataclass

import grpc

MAX_MESSAGE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    """Times of one connection, in seconds."""

    keepalive_s: float = 2.0
    keepalive_timeout_s: float = 4.0  # with keepalive_s: dead after three missed


def open_channel(address: str, config: ChannelConfig) -> grpc.aio.Channel:
    """A channel to `address`; connects when it is first used."""
    return grpc.aio.insecure_channel(
        address,
        options=(
            ("grpc.keepalive_time_ms", round(config.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(config.keepalive_timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            # Channels to one address would share a connection and its back-off: a restarted worker would be kept
            # waiting for its predecessor's failures.
            ("grpc.use_local_subchannel_pool", 1),
            # The environment's web proxy is not for workers.
            ("grpc.enable_http_proxy", 0),
        ),
    )


def describe_failure(error: grpc.aio.AioRpcError) -> str:
    """A failed call in words."""
    return f"{error.details() or 'no details'} ({error.code().name})"

"""gRPC settings that both ends of every worker's connection must share, written once.

A peer that was killed is noticed at once (its kernel closes the connection); one that is frozen or unplugged, by three
missed keepalives. Servers must allow such frequent pings, or they close the connection for it.
"""

Options = list[tuple[str, int]]

# A prompt of millions of tokens, or a long list of blocks, is one message; what is too long is refused by its meaning.
_UNLIMITED: Options = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]

_KEEPALIVE: Options = [
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 4000),
    ("grpc.http2.ping_timeout_ms", 4000),  # without it an unanswered keepalive is given a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CHANNEL_OPTIONS: Options = [
    *_UNLIMITED,
    *_KEEPALIVE,
    # A worker that is back at its address is reached at once, not after a backoff that another channel earned.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # peers are in the cluster, whatever the environment says
]

SERVER_OPTIONS: Options = [
    *_UNLIMITED,
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # two workers never share a port
]

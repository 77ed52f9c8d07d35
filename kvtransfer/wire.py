"""Hand-off messages to protobuf and back.

Everything from the wire is checked here: what makes no sense is a ValueError, which the streams report as
INVALID_ARGUMENT (from a consumer) or as a lost holder.
"""

from engine.executor import SampledToken
from engine.kvcache.block_hash import split_hashes
from kvtransfer.handle import PoolHandle
from kvtransfer.messages import (
    Accepted,
    CachedSource,
    Complete,
    Confirmed,
    ConsumerMessage,
    HolderMessage,
    Open,
    PrefillSource,
    Pulled,
    Ready,
)
from kvtransfer.sampling_wire import (
    logprobs_to_wire,
    sampled_token_from_wire,
    sampling_params_from_wire,
    sampling_params_to_wire,
)
from tandem.v1 import exchange_pb2

# --- consumer → holder


def request_to_wire(message: ConsumerMessage) -> exchange_pb2.HandoffRequest:
    match message:
        case Open():
            return exchange_pb2.HandoffRequest(open=_open_to_wire(message))
        case Pulled():
            return exchange_pb2.HandoffRequest(pulled=exchange_pb2.Pulled(num_blocks=message.num_blocks))


def request_from_wire(wire: exchange_pb2.HandoffRequest) -> ConsumerMessage:
    """
    Raises:
        ValueError: the request is empty or makes no sense.
    """
    match wire.WhichOneof("message"):
        case "open":
            return _open_from_wire(wire.open)
        case "pulled":
            return Pulled(wire.pulled.num_blocks)
        case _:
            raise ValueError("an empty hand-off request")


def _open_to_wire(message: Open) -> exchange_pb2.Open:
    wire = exchange_pb2.Open(
        handoff_id=message.handoff_id,
        request_id=message.request_id,
        consumer_instance_id=message.consumer_instance_id,
        fingerprint=message.fingerprint,
        timeout_ms=_milliseconds(message.timeout_s),
        staged=message.staged,
    )
    match message.source:
        case PrefillSource() as source:
            wire.prefill.CopyFrom(
                exchange_pb2.PrefillSource(
                    token_ids=source.token_ids,
                    num_prompt_tokens=source.num_prompt_tokens,
                    sampling_params=sampling_params_to_wire(source.params),
                    skip_blocks=source.skip_blocks,
                    cache_salt=source.cache_salt,
                    priority=source.priority,
                    cached_on_address=source.cached_on_address or "",
                    num_cached_blocks=source.num_cached_blocks,
                    seeds=source.seeds,
                )
            )
        case CachedSource() as source:
            wire.cached.block_hashes = b"".join(source.block_hashes)
            wire.cached.skip_blocks = source.skip_blocks
    return wire


def _open_from_wire(wire: exchange_pb2.Open) -> Open:
    source: PrefillSource | CachedSource
    match wire.WhichOneof("source"):
        case "prefill":
            prefill = wire.prefill
            if not prefill.token_ids:
                raise ValueError("a prefill of no tokens")
            source = PrefillSource(
                tuple(prefill.token_ids),
                prefill.num_prompt_tokens,
                sampling_params_from_wire(prefill.sampling_params),
                prefill.skip_blocks,
                prefill.cache_salt,
                prefill.priority,
                prefill.cached_on_address or None,
                prefill.num_cached_blocks,
                tuple(prefill.seeds),
            )
        case "cached":
            source = CachedSource(split_hashes(wire.cached.block_hashes), wire.cached.skip_blocks)
        case _:
            raise ValueError(f"hand-off {wire.handoff_id} names no source")
    return Open(
        wire.handoff_id,
        wire.request_id,
        wire.consumer_instance_id,
        wire.fingerprint,
        wire.timeout_ms / 1000,
        source,
        wire.staged,
    )


# --- holder → consumer


def response_to_wire(message: HolderMessage) -> exchange_pb2.HandoffResponse:
    match message:
        case Accepted():
            accepted = exchange_pb2.Accepted(
                num_cached_tokens=message.num_cached_tokens,
                num_blocks=message.num_blocks,
                lease_ms=_milliseconds(message.lease_s),
                pool=_handle_to_wire(message.pool),
            )
            return exchange_pb2.HandoffResponse(accepted=accepted)
        case Ready():
            ready = exchange_pb2.Ready(
                first=message.first,
                block_ids=message.block_ids,
                num_tokens=message.num_tokens,
                group=message.group,
                fence=message.fence,
            )
            return exchange_pb2.HandoffResponse(ready=ready)
        case Complete():
            complete = exchange_pb2.Complete(
                num_tokens=message.num_tokens,
                num_cached_tokens=message.num_cached_tokens,
                queued_s=message.queued_s,
                prefill_s=message.prefill_s,
                prompt_logprobs=message.prompt_logprobs,
            )
            for token in message.first_tokens:
                complete.first_tokens.add(token_id=token.token_id, logprobs=logprobs_to_wire(token))
            return exchange_pb2.HandoffResponse(complete=complete)
        case Confirmed():
            return exchange_pb2.HandoffResponse(confirmed=exchange_pb2.Confirmed(num_blocks=message.num_blocks))


def response_from_wire(wire: exchange_pb2.HandoffResponse) -> HolderMessage:
    """
    Raises:
        ValueError: the response is empty or makes no sense.
    """
    match wire.WhichOneof("message"):
        case "accepted":
            accepted = wire.accepted
            pool = _handle_from_wire(accepted.pool)
            return Accepted(accepted.num_cached_tokens, accepted.num_blocks, accepted.lease_ms / 1000, pool)
        case "ready":
            ready = wire.ready
            fence = ready.fence if ready.HasField("fence") else None
            return Ready(ready.first, tuple(ready.block_ids), ready.num_tokens, ready.group, fence)
        case "complete":
            complete = wire.complete
            return Complete(
                tuple(_sampled_token(token) for token in complete.first_tokens),
                complete.num_tokens,
                complete.num_cached_tokens,
                complete.queued_s,
                complete.prefill_s,
                complete.prompt_logprobs if complete.HasField("prompt_logprobs") else None,
            )
        case "confirmed":
            return Confirmed(wire.confirmed.num_blocks)
        case _:
            raise ValueError("an empty hand-off response")


def _sampled_token(wire: exchange_pb2.SampledToken) -> SampledToken:
    return sampled_token_from_wire(wire.token_id, wire.logprobs if wire.HasField("logprobs") else None)


def _handle_to_wire(handle: PoolHandle) -> exchange_pb2.PoolHandle:
    return exchange_pb2.PoolHandle(
        instance_id=handle.instance_id,
        kind=handle.kind,
        raw=handle.raw,
        offset=handle.offset,
        size=handle.size,
        bytes_per_block=handle.bytes_per_block,
        fingerprint=handle.fingerprint,
    )


def _handle_from_wire(wire: exchange_pb2.PoolHandle) -> PoolHandle:
    return PoolHandle(
        wire.instance_id, wire.kind, wire.raw, wire.offset, wire.size, wire.bytes_per_block, wire.fingerprint
    )


def _milliseconds(seconds: float) -> int:
    """0 means "the default": what is above it stays above."""
    return max(1, round(seconds * 1000)) if seconds > 0 else 0

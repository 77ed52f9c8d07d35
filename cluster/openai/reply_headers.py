"""What a reply's headers tell of how it came about: the workers, the cached tokens, and where the time went."""

from dataclasses import fields

from cluster.call_context import CACHED_TOKENS, DECODE_WORKER, PREFILL_WORKER
from cluster.generator import StageTimes
from cluster.text_generator import TextDelta

SERVER_TIMING = "server-timing"


def reply_headers(delta: TextDelta, num_cached_tokens: int) -> dict[str, str]:
    """The headers of a call.

    Args:
        delta: of its first choice. The stages' times are in it if it is the last.
        num_cached_tokens: of all its prompts.
    """
    headers = {}
    if delta.prefill_worker is not None:
        headers[PREFILL_WORKER] = delta.prefill_worker
    if delta.decode_worker is not None:
        headers[DECODE_WORKER] = delta.decode_worker
        headers[CACHED_TOKENS] = str(num_cached_tokens)
    if delta.stages is not None:
        headers[SERVER_TIMING] = _server_timing(delta.stages)
    return headers


def _server_timing(stages: StageTimes) -> str:
    """As W3C's Server Timing has it: durations in milliseconds."""
    return ", ".join(f"{stage.name};dur={getattr(stages, stage.name) * 1000:.3f}" for stage in fields(stages))

"""What is compared: ways to serve one model on two cores."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from benchmarks.served import served, served_by_vllm

# For 8 streams as long as a round can make them, and prompts beside them.
_MAX_MODEL_LEN = 8192
_NUM_BLOCKS = 4096  # of 16 tokens, a worker


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One way to serve."""

    name: str
    start: Callable[[], AbstractAsyncContextManager[str]]  # yields its base URL


@dataclass(frozen=True, slots=True)
class Peer:
    """vLLM's server."""

    python: str
    model: str
    preload: str
    cores: tuple[int, ...]  # that it computes on


def apart(dtype: str) -> Arrangement:
    """A prefill and a decode worker with a core each."""
    flags = ("--prefill-workers", "1", "--decode-workers", "1", "--threads", "1")
    return Arrangement("apart", lambda: served(*flags, *_pool(dtype)))


def colocated(dtype: str) -> Arrangement:
    """One worker that does both on two cores; its chunks are as long as its default says."""
    flags = ("--prefill-workers", "0", "--decode-workers", "1", "--threads", "2")
    return Arrangement("colocated", lambda: served(*flags, *_pool(dtype)))


def vllm(peer: Peer, dtype: str, num_batched_tokens: int) -> Arrangement:
    """Chunked prefill, its default; a chunk and the running streams are at most `num_batched_tokens` a step."""
    lengths = ("--max-model-len", str(_MAX_MODEL_LEN), "--max-num-batched-tokens", str(num_batched_tokens))
    flags = ("--dtype", dtype, *lengths)
    return Arrangement(
        f"vLLM, {num_batched_tokens}",
        lambda: served_by_vllm(peer.python, peer.model, *flags, cores=peer.cores, preload=peer.preload),
    )


def _pool(dtype: str) -> tuple[str, ...]:
    return ("--dtype", dtype, "--max-model-len", str(_MAX_MODEL_LEN), "--num-blocks", str(_NUM_BLOCKS))

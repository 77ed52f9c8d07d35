"""What the router decides about one request."""

from dataclasses import dataclass

from cluster.worker_info import WorkerInfo


@dataclass(frozen=True, slots=True)
class Plan:
    """Where one request goes."""

    decode: WorkerInfo
    prefill: WorkerInfo | None  # None: on the decode worker itself
    cached_on: WorkerInfo | None  # a worker that holds a longer prefix than who prefills
    num_cached_blocks: int  # leading blocks that nobody needs to compute: on `cached_on`, or else on who prefills
    num_uncached_tokens: int  # to be computed
    is_fallback: bool = False  # local for want of a prefill worker

    @property
    def prefills(self) -> WorkerInfo:
        """Who computes the prompt."""
        return self.prefill or self.decode

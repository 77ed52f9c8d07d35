"""Numbers of an engine: counted here, exported elsewhere."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Only ever rise."""

    # Tokens of requests admitted for the first time, and of them those found cached. What a preempted request finds
    # again of its own is no hit.
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: gauges first, then counters since the start."""

    num_running: int
    num_waiting: int
    num_receiving: int
    num_free_blocks: int
    num_cached_blocks: int
    num_active_blocks: int
    num_pins: int
    num_waiting_tokens: int  # not computed yet, of waiting and running requests

    num_prefix_queries: int  # tokens
    num_prefix_hits: int  # tokens
    num_preemptions: int
    num_computed_tokens: int
    num_sampled_tokens: int

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool that is held, 0 to 1."""
        return self.num_active_blocks / (self.num_free_blocks + self.num_cached_blocks + self.num_active_blocks)

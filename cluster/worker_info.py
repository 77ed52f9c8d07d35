"""A worker as the gateway knows it: what it is (`WorkerInfo`, for as long as it lives) and how busy (`WorkerLoad`)."""

from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What a worker does; the values are the words of metrics and messages."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One start of one worker. `worker_id` stays over restarts, `instance_id` is new with each."""

    worker_id: str
    instance_id: str
    role: Role
    address: str  # host:port of its gRPC server
    model_name: str
    model_path: str
    fingerprint: bytes  # equal fingerprints may exchange blocks
    block_size: int  # tokens
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    bytes_per_block: int
    dtype: str
    metrics_address: str = ""  # host:port of /metrics; empty: none
    host_id: str = ""  # equal ones can map each other's memory; empty: unknown
    device: str = "cpu"  # or "cuda: <name>, <uuid>"

    def can_exchange_with(self, other: "WorkerInfo") -> bool:
        """Whether blocks can go from one to the other: if both are on one host, or one does not say where it is."""
        return not self.host_id or not other.host_id or self.host_id == other.host_id


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How busy a worker last said it was."""

    num_running: int = 0
    num_waiting: int = 0
    num_transferring: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_active_blocks: int = 0
    num_waiting_tokens: int = 0  # prompt tokens not computed yet
    draining: bool = False

    @property
    def num_requests(self) -> int:
        return self.num_running + self.num_waiting + self.num_transferring


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker that the gateway was told of, for GetServerInfo, GetLoads and metrics."""

    address: str
    ready: bool
    info: WorkerInfo | None  # None: not reached yet
    load: WorkerLoad | None  # None: it has not said
    kv_events_silent: bool  # its KV events are missing: the router is blind to its cache
    num_directory_blocks: int  # of its blocks, in the directory
    last_error: str | None  # why it is not ready

"""A request in a decode worker, from the loop's point of view."""

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from engine.outputs import ReceiveTarget
from engine.sampling_params import SamplingParams
from tandem.v1 import worker_pb2 as pb
from worker.session import Session


class Stage(Enum):
    """Where its KV is."""

    ENGINE = "engine"  # waiting or running there; nothing is being copied
    PULLING = "pulling"  # a hand-off into its blocks is open
    NEEDS_PREFILL = "needs_prefill"  # the gateway was asked for another prefill worker


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One request that has not ended. Times are seconds of the loop's clock."""

    engine_id: str  # unique in this worker: two gateways may use the same request_id
    request_id: str
    session: Session
    prompt_token_ids: tuple[int, ...]
    resume_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str
    priority: int
    plan: pb.Plan
    deadline: float
    submitted_at: float
    timer: asyncio.TimerHandle | None = None

    stage: Stage = Stage.ENGINE
    prefill_worker: pb.Peer | None = None  # of the hand-off that is open, or was last
    target: ReceiveTarget | None = None
    num_confirmed_blocks: int = 0
    num_repairs: int = 0
    first_token_id: int | None = None  # by a prefill worker, delivered, not known to the engine yet
    num_pulled_tokens: int = 0  # prompt tokens that came from a third worker's cache
    usage: pb.Usage = field(default_factory=pb.Usage)

    admitted_at: float | None = None
    first_token_at: float | None = None
    prefill_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens whose KV is needed before the next one is sampled."""
        return self.prompt_token_ids + self.resume_token_ids

    def stages(self, now: float) -> pb.StageTimes:
        """Where its time went."""
        admitted_at = self.admitted_at if self.admitted_at is not None else now
        first_token_at = self.first_token_at if self.first_token_at is not None else now
        return pb.StageTimes(
            queued=admitted_at - self.submitted_at,
            prefill=self.prefill_s or first_token_at - admitted_at,
            transfer=self.transfer_s,
            decode=now - first_token_at,
        )

"""A prompt at one decode worker: all that its choices share for as long as they are there."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.plan import Plan
from cluster.prompt_streams import PromptStreams
from cluster.session import Session
from engine.kvcache.block_hash import BlockHash


@dataclass(slots=True)
class Attempt:
    """One Submit, of one sequence or of all choices of a prompt."""

    number: int  # 1: the first
    plan: Plan
    session: Session
    streams: PromptStreams
    block_hashes: Sequence[BlockHash]  # that its way was chosen by, of all its tokens
    num_tokens: int
    prefill_worker: str  # id of who prefills, by the last word on it
    num_repairs: int = 0  # in this attempt and those before it
    is_repaired: bool = False  # in this one
    tried: set[str] = field(default_factory=set)  # instance ids of workers that failed the prompt
    num_cached_tokens: int | None = None  # as the worker said first

    @property
    def wire_id(self) -> str:
        """What the ledger knows it by."""
        return self.streams.request_id

"""A request inside the engine: its tokens, and how far they are computed.

    WAITING ── admitted ──> RUNNING ── last token ──> FINISHED
       │  ^──── preempted ─────┘ ^
       └── blocks reserved ──> RECEIVING ── KV is here ──┘         (from each: aborted ──> FINISHED)

A request whose KV comes from a peer (`receives_kv`) is RECEIVING from the moment its blocks are reserved until the
worker says that they are filled. A preempted request keeps its tokens and loses its blocks: it waits again, and
computes again what is not cached by then, itself, even if its KV was received the first time.

Several choices of one prompt are a request that computes the prompt and has no output, and its *forks*, see `forking`:

    FORKING ── the prompt's last token is computed ──> RUNNING, or WAITING where there is no seat
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from engine.executor import SampledToken, SamplingInput, TokenMatcher
from engine.kvcache.block_hash import BlockHash, extend_hashes
from engine.sampling_params import FinishReason, SamplingParams


class RequestStatus(Enum):
    FORKING = "forking"
    WAITING = "waiting"
    RECEIVING = "receiving"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One sequence to be computed.

    Args:
        arrival_time: seconds, of the clock that steps are given.
        priority: the smaller, the sooner; then by arrival.
        resume_token_ids: generated elsewhere and already delivered: they begin the output, and are not reported again.
        receives_kv: blocks are reserved and then filled by the caller, see `Engine.finish_receiving`.
        prefill_only: ends with its first new token; its blocks are reported, each pinned once, as they are filled.
        matcher: of `params.structure`.

    Raises:
        ValueError: an empty prompt, or as many tokens resumed as may be generated.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "finish_reason",
        "first_scheduled_time",
        "forks",
        "has_new_token",
        "max_num_slots",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_filled_blocks",
        "num_preemptions",
        "order",
        "output_token_ids",
        "params",
        "prefill_only",
        "priority",
        "prompt",
        "prompt_logprobs",
        "prompt_token_ids",
        "receives_kv",
        "request_id",
        "root_hash",
        "sampling_input",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        arrival_time: float,
        cache_salt: str = "",
        priority: int = 0,
        resume_token_ids: Sequence[int] = (),
        receives_kv: bool = False,
        prefill_only: bool = False,
        matcher: TokenMatcher | None = None,
    ) -> None:
        if not prompt_token_ids:
            raise ValueError(f"the prompt of request {request_id} is empty")
        if len(resume_token_ids) >= params.max_tokens:
            raise ValueError(
                f"request {request_id} resumes with {len(resume_token_ids)} tokens, "
                f"but max_tokens={params.max_tokens} leaves none to generate"
            )
        self.request_id = request_id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.output_token_ids = list(resume_token_ids)
        self.token_ids = [*prompt_token_ids, *resume_token_ids]  # prompt and output
        self.params = params
        self.arrival_time = arrival_time
        self.cache_salt = cache_salt
        self.priority = priority
        self.receives_kv = receives_kv
        self.prefill_only = prefill_only
        self.sampling_input = SamplingInput(params, self.prompt_token_ids, self.output_token_ids, matcher)

        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_computed_tokens = 0  # leading tokens whose KV is in the request's blocks
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache when first admitted
        # Of the leading prompt tokens but the first, as far as they are known; None: not wanted, or told already.
        self.prompt_logprobs: list[SampledToken] | None = None if params.prompt_logprobs is None else []
        self.num_preemptions = 0
        self.num_filled_blocks = 0  # prefill_only: leading blocks reported, and pinned, as filled
        self.has_new_token = False  # whether it got a token here, beyond those it was resumed with
        self.first_scheduled_time: float | None = None
        self.block_hashes: list[BlockHash] = []  # of its leading full blocks
        self.forks: list[Request] | None = None  # of a prompt of several choices: those that wait for its last token
        self.prompt: Request | None = None  # of a fork, while it is FORKING

        # Given by the scheduler when it takes the request.
        self.root_hash = BlockHash(b"")
        self.order: tuple[int, float, int] = (
            priority,
            arrival_time,
            0,
        )  # total: who comes first, who is preempted last
        self.max_num_slots = 0  # KV slots it needs at most: the last token's KV is never computed

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_missing_prompt_logprobs(self) -> int:
        """Log-probabilities of the prompt that are wanted and not known yet."""
        return 0 if self.prompt_logprobs is None else self.num_prompt_tokens - 1 - len(self.prompt_logprobs)

    def take_prompt_logprobs(self) -> tuple[SampledToken, ...] | None:
        """They are told once."""
        if self.prompt_logprobs is None:
            return None
        assert self.num_missing_prompt_logprobs == 0, f"{self} lacks {self.num_missing_prompt_logprobs} of them"
        told = tuple(self.prompt_logprobs)
        self.prompt_logprobs = None
        return told

    def hold_to(self, matcher: TokenMatcher) -> None:
        """Gives it the matcher of `params.structure`, if it was made without; before an engine has it."""
        self.sampling_input = replace(self.sampling_input, matcher=matcher)

    def append_token(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)
        self.has_new_token = True

    def hashes(self, block_size: int) -> list[BlockHash]:
        """Names of all blocks that the tokens so far fill."""
        extend_hashes(self.block_hashes, self.root_hash, self.token_ids, block_size)
        return self.block_hashes

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, num_tokens={self.num_tokens}, "
            f"num_computed_tokens={self.num_computed_tokens})"
        )

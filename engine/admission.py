"""Which requests may have blocks: arithmetic of the pool's future.

A request is refused for ever if the pool could not hold it alone. It is admitted when the pool holds its tokens, and
what it and all others that hold blocks are expected to generate, each of a prompt's forks by itself; alone, as soon as
the pool holds its tokens, so that there is always progress.
"""

from collections.abc import Collection, Iterable

from engine.config import EngineConfig
from engine.kvcache.manager import KVCacheManager
from engine.request import Request


class Admission:
    """Decides for one scheduler; keeps nothing."""

    def __init__(self, config: EngineConfig, manager: KVCacheManager, vocab_size: int) -> None:
        self._config = config
        self._manager = manager
        self._vocab_size = vocab_size

    def check(self, request: Request) -> None:
        """Proves that the request is well-formed and fits the pool, alone if need be.

        Raises:
            ValueError: it does not; the message has the numbers.
        """
        if request.num_tokens >= self._config.max_model_len:
            raise ValueError(
                f"request {request.request_id} has {request.num_tokens} tokens: "
                f"with one to generate they must not exceed max_model_len={self._config.max_model_len}"
            )
        self._check_token_ids(request, "token", (min(request.token_ids), max(request.token_ids)))
        self._check_token_ids(request, "logit_bias token", request.params.logit_bias)
        needed = self._manager.num_blocks_for(self.max_num_slots(request))
        usable = self._manager.pool.num_usable_blocks
        if needed > usable:
            raise ValueError(
                f"request {request.request_id} can never fit: its prompt of {request.num_prompt_tokens} tokens with "
                f"max_tokens={request.params.max_tokens} needs {needed} blocks of {self._config.block_size} tokens, "
                f"the pool has {usable}"
            )

    def max_num_slots(self, request: Request) -> int:
        """KV slots that the request needs at most: the KV of its very last token is never computed."""
        if request.prefill_only:
            return request.num_tokens
        return min(request.num_prompt_tokens + request.params.max_tokens, self._config.max_model_len) - 1

    def reserve(self, request: Request, others: Collection[Request]) -> bool:
        """Takes blocks for all tokens of a waiting request, cached ones first, if there is room for them and growth.

        Args:
            others: all that hold blocks.

        Returns False, and changes nothing, if it must go on waiting. Costs a look at each of the others and at some of
        the hashes, not at the pool: it is asked again every step.
        """
        block_size = self._config.block_size
        hashes = request.hashes(block_size)
        # At least the last token is computed, for its logits.
        max_cached = request.num_tokens - 1
        if request.num_missing_prompt_logprobs > 0 and not request.receives_kv:
            # And so is every one whose logits say what the prompt's next token was worth.
            max_cached = len(request.prompt_logprobs or ())
        num_cached = self._manager.num_computed_blocks(hashes, max_cached // block_size)
        num_needed = self._manager.num_blocks_for(request.num_tokens)
        growth = (self._growth((request,), num_needed) + self._growth(others)) if others else 0
        at_least = num_needed - num_cached * len(self._manager.specs)  # exact if others hold the whole cached prefix
        if at_least + growth > self._manager.pool.num_available_blocks:
            return False
        computed = self._manager.get_computed_blocks(hashes, num_cached)
        return self._manager.allocate_slots(
            request.request_id, request.num_tokens, computed=computed, keep_available=growth
        )

    def _growth(self, requests: Iterable[Request], num_held: int | None = None) -> int:
        """Blocks that these are expected to need beyond those that they hold, or `num_held`.

        Who runs has got its blocks for this step before anybody is admitted: no fork that runs lacks its copy.
        """
        growth = 0
        for request in requests:
            held = self._manager.num_held_blocks(request.request_id) if num_held is None else num_held
            growth += max(0, self._num_expected(request) - held)
        return growth

    def _num_expected(self, request: Request) -> int:
        """Blocks that the request, or all its forks together, are expected to come to."""
        num_blocks_for = self._manager.num_blocks_for
        num_slots = min(request.num_tokens + self._config.expected_growth_tokens, request.max_num_slots)
        if request.forks is None or num_slots <= request.num_tokens:
            return num_blocks_for(max(num_slots, request.num_tokens))
        # They share the blocks that the prompt fills, and each comes to have a copy of the one that it fills in part.
        num_shared = num_blocks_for(request.num_tokens // self._config.block_size * self._config.block_size)
        num_forks = min(len(request.forks), self._config.max_num_seqs)
        return num_shared + num_forks * (num_blocks_for(num_slots) - num_shared)

    def _check_token_ids(self, request: Request, what: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(
                    f"{what} id {token_id} of request {request.request_id} "
                    f"is not in the vocabulary [0, {self._vocab_size})"
                )

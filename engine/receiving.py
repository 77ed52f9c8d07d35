"""Requests whose KV comes from a peer: their blocks are reserved, filled by the caller, and run or given back."""

from collections.abc import Mapping

from engine.forking import check_fork_tokens, fork_off
from engine.kvcache.manager import KVCacheManager
from engine.request import Request
from engine.requests import Requests
from engine.sampling_params import FinishReason


class Receiving:
    """What the caller says of blocks that it fills, while their requests are RECEIVING."""

    def __init__(self, requests: Requests, manager: KVCacheManager) -> None:
        self._requests = requests
        self._manager = manager

    def commit_blocks(self, request_id: str, num_blocks: int) -> None:
        """Leading blocks of a receiving request are filled: full ones enter the cache.

        The block of the last token stays out until the request runs: if the peer is lost, that token is computed here,
        into this block, and what is cached must never be written again.
        """
        request = self._receiving(request_id)
        self._cache(request, min(num_blocks, (request.num_tokens - 1) // self._manager.block_size))
        self._requests.wake()

    def finish(
        self, request_id: str, num_tokens: int, first_token: int | None, fork_tokens: Mapping[str, int] | None
    ) -> FinishReason | None:
        """The KV of `num_tokens` leading tokens is in the request's blocks: it runs from now on.

        Args:
            first_token: the next token, sampled by the peer and delivered; None: it is sampled here.
            fork_tokens: likewise, of a prompt: of each of its forks.

        Raises:
            ValueError: no such request receives, or the numbers contradict its tokens.
        """
        request = self._receiving(request_id)
        is_sampled = first_token is not None or fork_tokens is not None
        if request.prefill_only and is_sampled:
            raise ValueError(f"{request_id} is to be prefilled here: its next token cannot come from a peer")
        if not 0 <= num_tokens <= request.num_tokens:
            raise ValueError(f"{num_tokens} tokens received of {request.num_tokens} that {request_id} has")
        check_fork_tokens(request, first_token, fork_tokens)
        request.receives_kv = False
        if is_sampled:
            request.prompt_logprobs = None  # told with the first token
        elif request.num_missing_prompt_logprobs > 0:
            request.num_cached_tokens = 0  # all is computed here, for the logits of every token
            self._requests.wait_again(request)
            return None
        is_whole = is_sampled and num_tokens == request.num_tokens
        if not is_whole:
            # What was committed before counts. The rest is computed here: the peer was lost, perhaps after it had
            # sampled. The prompt's last token always is if there is no next one yet, for its logits.
            num_committed = self._manager.num_registered_blocks(request_id) * self._manager.block_size
            num_tokens = min(max(num_tokens, num_committed), request.num_tokens - 1)
        self._cache(request, num_tokens // self._manager.block_size)
        request.num_computed_tokens = num_tokens
        self._requests.run(request)
        self._requests.wake()
        if first_token is not None:
            return self._requests.append_token(request, first_token)
        if fork_tokens is not None:
            for fork in tuple(request.forks or ()):
                self._requests.append_token(fork, fork_tokens[fork.request_id])
            if is_whole or not request.forks:
                fork_off(request, {}, self._requests, self._manager)
        return None

    def _receiving(self, request_id: str) -> Request:
        request = self._requests.receiving.get(request_id)
        if request is None:
            raise ValueError(f"no request {request_id} is receiving")
        return request

    def _cache(self, request: Request, num_blocks: int) -> None:
        self._manager.cache_blocks(request.request_id, request.hashes(self._manager.block_size), num_blocks)

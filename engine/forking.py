"""Several choices of one prompt: the prompt is computed once, and its *forks* continue it.

The prompt is a request of its own, without output. Until its last token is computed its forks only wait (FORKING); then
each gets its first token from that one row of logits, and those that have not ended go on as ordinary requests: first
in the blocks of the prompt, which they share, or, where there is no seat for them, waiting as preempted requests do.
Nothing is left of the prompt but its blocks. A fork whose first token is known already, because a peer has sampled it
before it was lost, keeps it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.executor import SampledToken
from engine.kvcache.manager import KVCacheManager
from engine.outputs import RequestOutput
from engine.request import Request, RequestStatus
from engine.requests import Requests


def check_forks(prompt: Request, forks: Sequence[Request]) -> None:
    """
    Raises:
        ValueError: they are not continuations of this prompt that differ in their seeds (and names) alone.
    """
    name = prompt.request_id
    for request in (prompt, *forks):
        if request.output_token_ids:
            raise ValueError(f"request {request.request_id} resumes with tokens: choices of {name} begin together")
    for fork in forks:
        if fork.receives_kv:
            raise ValueError(f"fork {fork.request_id} of {name} receives no KV of its own")
        for field in ("prompt_token_ids", "cache_salt", "priority", "arrival_time", "prefill_only"):
            if getattr(fork, field) != getattr(prompt, field):
                raise ValueError(f"fork {fork.request_id} has another {field} than its prompt {name}")
        if replace(fork.params, seed=prompt.params.seed) != prompt.params:
            raise ValueError(f"fork {fork.request_id} differs from its prompt {name} in more parameters than the seed")


def check_fork_tokens(prompt: Request, first_token: int | None, fork_tokens: Mapping[str, int] | None) -> None:
    """
    Raises:
        ValueError: what a peer has sampled is not what the request waits for.
    """
    if prompt.forks is None:
        if fork_tokens is not None:
            raise ValueError(f"{prompt.request_id} has no forks: its next token is first_token")
        return
    if first_token is not None:
        raise ValueError(f"{prompt.request_id} has forks: its next tokens are fork_tokens")
    missing = [
        fork.request_id for fork in prompt.forks if fork_tokens is not None and fork.request_id not in fork_tokens
    ]
    if missing:
        raise ValueError(f"no first token for {', '.join(missing)}, forks of {prompt.request_id}")


def fork_off(
    prompt: Request, sampled: Mapping[str, SampledToken], requests: Requests, manager: KVCacheManager
) -> list[RequestOutput]:
    """The prompt is computed: its forks get their first tokens, and go on without it.

    Args:
        sampled: the tokens of those that have none yet.
    """
    outputs: list[RequestOutput] = []
    prompt_logprobs = prompt.take_prompt_logprobs()
    for fork in tuple(prompt.forks or ()):
        _inherit(fork, prompt)
        if not fork.output_token_ids:
            outputs.append(requests.take_token(fork, sampled[fork.request_id], prompt_logprobs))
        if fork.status is RequestStatus.FINISHED:
            continue
        if requests.num_seats < 0:  # the prompt's own is free
            requests.wait_again(fork)
            continue
        requests.detach(fork)
        manager.fork(prompt.request_id, fork.request_id)
        fork.num_computed_tokens = prompt.num_computed_tokens
        requests.run(fork)
    requests.finish(prompt, None)
    return outputs


def _inherit(fork: Request, prompt: Request) -> None:
    """What is known of the prompt is known of its fork: when it began, what was cached, the names of its blocks."""
    fork.first_scheduled_time = prompt.first_scheduled_time
    fork.num_cached_tokens = prompt.num_cached_tokens
    fork.block_hashes = list(prompt.block_hashes)
    fork.prompt_logprobs = None  # told once

"""How many log-probabilities of prompts one reply may tell.

Each of them is some sixty bytes of JSON and several hundred of memory while the reply is made. Two fields of a request
multiply them: with `echo` and `logprobs` each choice has the prompt's own lists, as at OpenAI, and a body may hold many
prompts. `prompt_logprobs` comes with the first choice of a prompt alone.
"""

from collections.abc import Iterable

from cluster.errors import InvalidRequest

# Of 8,192 tokens with 5 more for each: 21 choices. Of 2 kilotokens with 1 more: 256 prompts.
MAX_PROMPT_LOGPROBS = 2**20


def check_prompt_logprobs(
    prompt_lengths: Iterable[int], *, num_choices: int, prompt_logprobs: int | None, echoed_logprobs: int | None
) -> None:
    """
    Args:
        prompt_lengths: of each prompt, in tokens.
        num_choices: of each prompt.
        prompt_logprobs: the field; None: not asked for.
        echoed_logprobs: the field `logprobs`, where the prompts are echoed; None: not asked for.

    Raises:
        InvalidRequest: a reply would tell more than `MAX_PROMPT_LOGPROBS`.
    """
    num_tokens = sum(prompt_lengths)
    once = 0 if prompt_logprobs is None else num_tokens * (prompt_logprobs + 1)
    each = 0 if echoed_logprobs is None else num_tokens * num_choices * (echoed_logprobs + 1)
    if once + each > MAX_PROMPT_LOGPROBS:
        name = "logprobs" if each > once else "prompt_logprobs"
        product = f"{num_tokens} prompt tokens"
        if each > once:
            product += f" x {num_choices} choices"
        raise InvalidRequest(
            f"{name} asks for too many log-probabilities of prompts: {product} and the best tokens at each make "
            f"{once + each}, and a reply may tell {MAX_PROMPT_LOGPROBS} at most; send fewer prompts or choices at once",
            param=name,
        )

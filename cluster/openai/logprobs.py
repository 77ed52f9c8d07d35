"""Log-probabilities in OpenAI's two forms.

JSON has no infinity: what a token's log-probability is when it was impossible is told as -9999.0, as OpenAI does.
"""

from collections.abc import Callable, Sequence
from typing import Any

from cluster.openai.prompt_offsets import prompt_offsets
from cluster.text.detokenizer import Detokenizer
from engine.executor import SampledToken
from engine.sampling.logprobs import IMPOSSIBLE
from engine.tokenizer.tokenizer import Tokenizer


def finite(logprob: float | None) -> float:
    """A log-probability as JSON can say it."""
    # Written so that NaN is impossible as well.
    return logprob if logprob is not None and logprob > IMPOSSIBLE else IMPOSSIBLE


def num_told(tokens: Sequence[SampledToken]) -> int:
    """How many log-probabilities are known of these tokens: about what it costs to tell them."""
    return len(tokens) * (1 + len(tokens[-1].top)) if tokens else 0


def token_id_spelling(token_id: int) -> str:
    """vLLM's `return_tokens_as_token_ids`: a token by its number."""
    return f"token_id:{token_id}"


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[SampledToken], num_top: int, *, by_id: bool = False
) -> dict[str, Any]:
    """Chat: one entry a token, each with its bytes."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        token = token_id_spelling(token_id) if by_id else data.decode("utf-8", "replace")
        return {"token": token, "logprob": finite(logprob), "bytes": list(data)}

    return {
        "content": [
            entry(token.token_id, token.logprob)
            | {"top_logprobs": [entry(token_id, logprob) for token_id, logprob in token.top[:num_top]]}
            for token in tokens
        ],
        "refusal": None,
    }


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], tokens: Sequence[SampledToken], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's form: for each token of the prompt an object of token ids, its own and the best; null for the first.

    A token's rank is known if it is among the best.

    Args:
        tokens: of the prompt, from the second on.
    """

    def entries(token: SampledToken) -> dict[str, Any]:
        best: dict[int, tuple[float | None, int | None]] = {
            token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(token.top[:num_top], start=1)
        }
        best.setdefault(token.token_id, (token.logprob, None))
        return {
            str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
            for token_id, (logprob, rank) in best.items()
        }

    assert len(tokens) == len(prompt_token_ids) - 1, (len(tokens), len(prompt_token_ids))
    return [None, *map(entries, tokens)]


Lists = dict[str, list[Any]]


class CompletionLogprobs:
    """Completions: four lists beside each other. Of one choice, from its first token on.

    `text_offset` is where in the choice's text a token's characters begin, so it goes on from delta to delta. A token
    that is a part of a character only is written `bytes:\\x..`, its bytes in hexadecimal, as OpenAI does.
    """

    def __init__(
        self, tokenizer: Tokenizer, num_top: int, *, skip_special_tokens: bool, offset: int = 0, by_id: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = offset
        self._text = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._spell: Callable[[int], str] = token_id_spelling if by_id else self._spelling

    def follow(self, text: str) -> None:
        """The choice's text begins with this one, a prompt."""
        self._offset = len(text)

    def prompt_lists(self, text: str, token_ids: Sequence[int], tokens: Sequence[SampledToken]) -> Lists:
        """The lists of a prompt that stands before the generated text; nothing is known of its first token.

        Args:
            text: the prompt, as it is shown.
            token_ids: all of the prompt's.
            tokens: the same, from the second on.
        """
        assert len(tokens) == len(token_ids) - 1, (len(tokens), len(token_ids))
        return {
            "text_offset": prompt_offsets(self._tokenizer, token_ids, text),
            "token_logprobs": [None, *(finite(token.logprob) for token in tokens)],
            "tokens": [self._spell(token_id) for token_id in token_ids],
            "top_logprobs": [None, *map(self._top, tokens)],
        }

    def push(self, tokens: Sequence[SampledToken]) -> Lists:
        """The next tokens' lists."""
        lists: Lists = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token in tokens:
            lists["text_offset"].append(self._offset)
            lists["token_logprobs"].append(finite(token.logprob))
            lists["tokens"].append(self._spell(token.token_id))
            lists["top_logprobs"].append(self._top(token))
            self._offset += len(self._text.push([token.token_id]))
        return lists

    def _top(self, token: SampledToken) -> dict[str, float]:
        """The best tokens and the sampled one; of two that are spelled alike the better."""
        top: dict[str, float] = {}
        for token_id, logprob in (*token.top[: self._num_top], (token.token_id, token.logprob)):
            top.setdefault(self._spell(token_id), finite(logprob))
        return top

    def _spelling(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

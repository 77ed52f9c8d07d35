"""Log-probabilities in OpenAI's two forms.

JSON has no infinity: what a token's log-probability is when it was impossible is told as -9999.0, as OpenAI does.
"""

from collections.abc import Sequence
from typing import Any

from cluster.text.detokenizer import Detokenizer
from engine.executor import SampledToken
from engine.tokenizer.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0


def _number(logprob: float | None) -> float:
    # Written so that NaN is impossible as well.
    return logprob if logprob is not None and logprob > IMPOSSIBLE else IMPOSSIBLE


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[SampledToken], num_top: int) -> dict[str, Any]:
    """Chat: one entry a token, each with its bytes."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": _number(logprob), "bytes": list(data)}

    return {
        "content": [
            entry(token.token_id, token.logprob)
            | {"top_logprobs": [entry(token_id, logprob) for token_id, logprob in token.top[:num_top]]}
            for token in tokens
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """Completions: four lists beside each other. Of one choice, from its first token on.

    `text_offset` is where in the choice's text a token's characters begin, so it goes on from delta to delta. A token
    that is a part of a character only is written `bytes:\\x..`, its bytes in hexadecimal, as OpenAI does.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, offset: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = offset
        self._text = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)

    def push(self, tokens: Sequence[SampledToken]) -> dict[str, list[Any]]:
        """The next tokens' lists."""
        lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token in tokens:
            lists["text_offset"].append(self._offset)
            lists["token_logprobs"].append(_number(token.logprob))
            lists["tokens"].append(self._spell(token.token_id))
            lists["top_logprobs"].append(self._top(token))
            self._offset += len(self._text.push([token.token_id]))
        return lists

    def _top(self, token: SampledToken) -> dict[str, float]:
        """The best tokens and the sampled one; of two that are spelled alike the better."""
        top: dict[str, float] = {}
        for token_id, logprob in (*token.top[: self._num_top], (token.token_id, token.logprob)):
            top.setdefault(self._spell(token_id), _number(logprob))
        return top

    def _spell(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

"""How many tokens a call took."""

from collections.abc import Sequence
from typing import Any

from cluster.text_generator import TextDelta
from cluster.text_request import PlannedText


class Usage:
    """Counts the tokens of a call. A prompt counts once, however many choices continue it."""

    def __init__(self, planned: Sequence[PlannedText]) -> None:
        self._prompt_tokens = sum(len(prompt.prompt_token_ids) for prompt in planned)
        self._completion_tokens = 0
        self._cached_tokens: dict[int, int] = {}
        # Index of each prompt's first choice: its cached tokens are the prompt's.
        self._first_choices = set()
        base = 0
        for prompt in planned:
            self._first_choices.add(base)
            base += prompt.options.n

    def add(self, delta: TextDelta) -> None:
        self._completion_tokens += len(delta.tokens)
        if delta.index in self._first_choices:
            self._cached_tokens.setdefault(delta.index, delta.num_cached_tokens)

    @property
    def cached_tokens(self) -> int:
        """Of the prompts, as far as they have begun."""
        return sum(self._cached_tokens.values())

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

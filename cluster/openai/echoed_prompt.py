"""A prompt that each of its choices begins with: what is shown of it is made once, and shared."""

from collections.abc import Sequence
from functools import cached_property

from cluster.openai.logprobs import CompletionLogprobs, Lists
from cluster.text_request import PlannedText
from engine.executor import SampledToken
from engine.tokenizer.tokenizer import Tokenizer


class EchoedPrompt:
    """One prompt's text and, if they are wanted, the lists of its log-probabilities."""

    def __init__(self, tokenizer: Tokenizer, planned: PlannedText) -> None:
        self._tokenizer = tokenizer
        self._planned = planned
        self._num_left = planned.options.n  # choices that have not begun
        self._lists: Lists | None = None

    @cached_property
    def text(self) -> str:
        """As the client wrote it, or as its token ids say."""
        if self._planned.prompt is not None:
            return self._planned.prompt
        skip = self._planned.options.skip_special_tokens
        return self._tokenizer.decode(self._planned.prompt_token_ids, skip_special_tokens=skip)

    def lists(self, choice: CompletionLogprobs, tokens: Sequence[SampledToken]) -> Lists:
        """For a choice that begins, once for each of them. The same objects for all, which nobody may write into; they
        can be large, so that they are let go of with the last.

        Args:
            choice: its own log-probabilities, which go on from here.
            tokens: the prompt's, from the second on.
        """
        lists = self._lists
        if lists is None:
            lists = self._lists = choice.prompt_lists(self.text, self._planned.prompt_token_ids, tokens)
        choice.follow(self.text)
        self._num_left -= 1
        if not self._num_left:
            self._lists = None
        return lists

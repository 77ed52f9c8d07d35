"""`/v1/completions`: a prompt is continued."""

from collections.abc import Iterator, Sequence

from cluster.openai.completion_request import CompletionRequest
from cluster.openai.echoed_prompt import EchoedPrompt
from cluster.openai.logprobs import CompletionLogprobs, num_told, prompt_logprobs
from cluster.openai.reply import Json
from cluster.text_generator import TextDelta
from cluster.text_request import PlannedText, reported_stop
from engine.executor import SampledToken
from engine.tokenizer.tokenizer import Tokenizer


class CompletionShape:
    """Objects of `/v1/completions`: a chunk's choice looks like a whole one."""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, request: CompletionRequest, planned: Sequence[PlannedText], tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._planned = planned
        self._echoed = [EchoedPrompt(tokenizer, prompt) for prompt in planned] if request.echo else []
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()

    def chunk_choices(self, delta: TextDelta) -> Iterator[Json]:
        shows_tokens = self._request.logprobs is not None or self._request.return_token_ids
        begins = delta.index not in self._begun
        if (
            delta.text
            or delta.finish_reason is not None
            or (shows_tokens and delta.tokens)
            or (begins and (self._request.echo or self._tells_prompt_logprobs(delta)))
        ):
            yield self.whole_choice(delta)

    def whole_choice(self, delta: TextDelta) -> Json:
        prompt = self._prompt_of(delta)
        begins = delta.index not in self._begun
        self._begun.add(delta.index)
        echoed = self._echoed[self._prompt_number(delta)] if begins and self._request.echo else None
        choice: Json = {
            "index": delta.index,
            "text": (echoed.text if echoed is not None else "") + delta.text,
            "logprobs": self._logprobs_of(delta, echoed),
            "finish_reason": delta.finish_reason.value if delta.finish_reason is not None else None,
            "stop_reason": reported_stop(delta.matched_stop, prompt.options),
        }
        if self._request.return_token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
            if begins:
                choice["prompt_token_ids"] = list(prompt.prompt_token_ids)
        if begins and self._tells_prompt_logprobs(delta):
            assert self._request.prompt_logprobs is not None, "they are told only where they were asked for"
            choice["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, prompt.prompt_token_ids, _of_prompt(delta), self._request.prompt_logprobs
            )
        return choice

    def size(self, delta: TextDelta) -> int:
        size = num_told(delta.tokens)
        if delta.index in self._begun:
            return size
        if self._request.return_token_ids:
            size += len(self._prompt_of(delta).prompt_token_ids)
        if delta.prompt_logprobs is not None and (self._request.echo or self._tells_prompt_logprobs(delta)):
            size += num_told(delta.prompt_logprobs)
        return size

    def _prompt_number(self, delta: TextDelta) -> int:
        return delta.index // self._request.num_choices

    def _prompt_of(self, delta: TextDelta) -> PlannedText:
        return self._planned[self._prompt_number(delta)]

    def _tells_prompt_logprobs(self, delta: TextDelta) -> bool:
        """The first choice of a prompt does, for all of them."""
        return self._request.prompt_logprobs is not None and delta.index % self._request.num_choices == 0

    def _logprobs_of(self, delta: TextDelta, echoed: EchoedPrompt | None) -> Json | None:
        if self._request.logprobs is None:
            return None
        lists = self._logprobs.get(delta.index)
        if lists is None:
            lists = self._logprobs[delta.index] = CompletionLogprobs(
                self._tokenizer,
                self._request.logprobs,
                skip_special_tokens=self._prompt_of(delta).options.skip_special_tokens,
                by_id=bool(self._request.return_tokens_as_token_ids),
            )
        if echoed is None:
            return lists.push(delta.tokens)
        before = echoed.lists(lists, _of_prompt(delta))
        return {name: before[name] + values for name, values in lists.push(delta.tokens).items()}


def _of_prompt(delta: TextDelta) -> tuple[SampledToken, ...]:
    assert delta.prompt_logprobs is not None, f"choice {delta.index} began without its prompt's log-probabilities"
    return delta.prompt_logprobs

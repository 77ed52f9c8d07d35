"""`/v1/completions`: a prompt is continued."""

from collections.abc import Iterator, Sequence

from cluster.openai.completion_request import CompletionRequest
from cluster.openai.logprobs import CompletionLogprobs, Lists, prompt_logprobs
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
        self._prompts = [prompt for prompt in planned for _ in range(prompt.options.n)]  # by choice
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()

    def chunk_choices(self, delta: TextDelta) -> Iterator[Json]:
        shows_tokens = self._request.logprobs is not None or self._request.return_token_ids
        is_first = delta.index not in self._begun
        shows_prompt = self._request.echo or self._request.prompt_logprobs is not None
        if (
            delta.text
            or delta.finish_reason is not None
            or (shows_tokens and delta.tokens)
            or (is_first and shows_prompt)
        ):
            yield self.whole_choice(delta)

    def whole_choice(self, delta: TextDelta) -> Json:
        prompt = self._prompts[delta.index]
        is_first = delta.index not in self._begun
        self._begun.add(delta.index)
        echoed = self._prompt_text(prompt) if is_first and self._request.echo else None
        choice: Json = {
            "index": delta.index,
            "text": (echoed or "") + delta.text,
            "logprobs": self._logprobs_of(delta, echoed),
            "finish_reason": delta.finish_reason.value if delta.finish_reason is not None else None,
            "stop_reason": reported_stop(delta.matched_stop, prompt.options),
        }
        if self._request.return_token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
            if is_first:
                choice["prompt_token_ids"] = list(prompt.prompt_token_ids)
        if self._request.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, prompt.prompt_token_ids, _of_prompt(delta), self._request.prompt_logprobs
            )
        return choice

    def _prompt_text(self, prompt: PlannedText) -> str:
        if prompt.prompt is not None:
            return prompt.prompt
        skip = prompt.options.skip_special_tokens
        return self._tokenizer.decode(prompt.prompt_token_ids, skip_special_tokens=skip)

    def _logprobs_of(self, delta: TextDelta, echoed: str | None) -> Json | None:
        if self._request.logprobs is None:
            return None
        lists = self._logprobs.get(delta.index)
        if lists is None:
            lists = self._logprobs[delta.index] = CompletionLogprobs(
                self._tokenizer,
                self._request.logprobs,
                skip_special_tokens=self._prompts[delta.index].options.skip_special_tokens,
                by_id=bool(self._request.return_tokens_as_token_ids),
            )
        if echoed is None:
            return lists.push(delta.tokens)
        before: Lists = lists.push_prompt(echoed, self._prompts[delta.index].prompt_token_ids, _of_prompt(delta))
        return {name: before[name] + values for name, values in lists.push(delta.tokens).items()}


def _of_prompt(delta: TextDelta) -> tuple[SampledToken, ...]:
    assert delta.prompt_logprobs is not None, f"choice {delta.index} began without its prompt's log-probabilities"
    return delta.prompt_logprobs

"""`/v1/chat/completions`: the assistant answers."""

from collections.abc import Iterator

from cluster.openai.chat_request import ChatRequest
from cluster.openai.logprobs import chat_logprobs
from cluster.openai.reply import Json
from cluster.text_generator import TextDelta
from cluster.text_request import PlannedText, reported_stop
from engine.tokenizer.tokenizer import Tokenizer


class ChatShape:
    """Objects of `/v1/chat/completions`."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, request: ChatRequest, planned: PlannedText, tokenizer: Tokenizer) -> None:
        self._request = request
        self._planned = planned
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def chunk_choices(self, delta: TextDelta) -> Iterator[Json]:
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            first = self._choice("delta", {"role": "assistant", "content": ""}, delta.index)
            if self._request.return_token_ids:
                first["prompt_token_ids"] = list(self._planned.prompt_token_ids)
            yield first
        shows_tokens = self._request.logprobs or self._request.return_token_ids
        if delta.text or delta.finish_reason is not None or (shows_tokens and delta.tokens):
            content = {"content": delta.text} if delta.text else {}
            yield self._filled(self._choice("delta", content, delta.index), delta)

    def whole_choice(self, delta: TextDelta) -> Json:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        choice = self._filled(self._choice("message", message, delta.index), delta)
        if self._request.return_token_ids:
            choice["prompt_token_ids"] = list(self._planned.prompt_token_ids)
        return choice

    def _choice(self, key: str, content: Json, index: int) -> Json:
        return {"index": index, key: content, "logprobs": None, "finish_reason": None}

    def _filled(self, choice: Json, delta: TextDelta) -> Json:
        if self._request.logprobs:
            choice["logprobs"] = chat_logprobs(self._tokenizer, delta.tokens, self._request.top_logprobs or 0)
        if delta.finish_reason is not None:
            choice["finish_reason"] = delta.finish_reason.value
        choice["stop_reason"] = reported_stop(delta.matched_stop, self._planned.options)
        if self._request.return_token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
        return choice

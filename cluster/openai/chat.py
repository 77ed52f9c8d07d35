"""`/v1/chat/completions`: the assistant answers."""

from collections.abc import Iterator

from cluster.openai.chat_message import ChatMessage
from cluster.openai.chat_request import ChatRequest
from cluster.openai.logprobs import chat_logprobs, num_told, prompt_logprobs
from cluster.openai.reply import Json
from cluster.text_generator import TextDelta
from cluster.text_request import PlannedText, reported_stop
from cluster.tools.call_parser import call_parser
from cluster.tools.call_style import CallStyle
from cluster.tools.tool_use import ToolUse
from engine.tokenizer.tokenizer import Tokenizer


class ChatShape:
    """Objects of `/v1/chat/completions`."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self,
        request: ChatRequest,
        planned: PlannedText,
        tokenizer: Tokenizer,
        tool_use: ToolUse,
        style: CallStyle,
    ) -> None:
        self._request = request
        self._planned = planned
        self._tokenizer = tokenizer
        self._tool_use = tool_use
        self._style = style
        self._messages: dict[int, ChatMessage] = {}  # by choice

    def chunk_choices(self, delta: TextDelta) -> Iterator[Json]:
        if delta.index not in self._messages:
            # A message of nothing but calls has no content, not an empty one.
            first = {"role": "assistant", "content": None if self._tool_use.is_forced else ""}
            yield self._with_prompt(self._choice("delta", first, delta.index), delta)
        is_last = delta.finish_reason is not None
        added = self._message(delta.index).deltas(delta.text, is_last=is_last)
        for content in added[:-1]:
            yield self._choice("delta", content, delta.index)
        shows_tokens = self._request.logprobs or self._request.return_token_ids
        if added or is_last or (shows_tokens and delta.tokens):
            yield self._filled(self._choice("delta", added[-1] if added else {}, delta.index), delta)

    def whole_choice(self, delta: TextDelta) -> Json:
        message = self._message(delta.index).whole(delta.text)
        return self._with_prompt(self._filled(self._choice("message", message, delta.index), delta), delta)

    def size(self, delta: TextDelta) -> int:
        size = num_told(delta.tokens)
        if delta.index not in self._messages:
            if self._request.return_token_ids:
                size += len(self._planned.prompt_token_ids)
            if delta.index == 0:
                size += num_told(delta.prompt_logprobs or ())
        return size

    def _message(self, index: int) -> ChatMessage:
        message = self._messages.get(index)
        if message is None:
            message = self._messages[index] = ChatMessage(call_parser(self._tool_use, self._style))
        return message

    def _choice(self, key: str, content: Json, index: int) -> Json:
        return {"index": index, key: content, "logprobs": None, "finish_reason": None}

    def _with_prompt(self, choice: Json, delta: TextDelta) -> Json:
        """The choice with what is told of its prompt; log-probabilities by the first choice, for all of them."""
        prompt_token_ids = self._planned.prompt_token_ids
        if self._request.return_token_ids:
            choice["prompt_token_ids"] = list(prompt_token_ids)
        if self._request.prompt_logprobs is not None and delta.index == 0:
            assert delta.prompt_logprobs is not None, (
                f"choice {delta.index} began without its prompt's log-probabilities"
            )
            choice["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, prompt_token_ids, delta.prompt_logprobs, self._request.prompt_logprobs
            )
        return choice

    def _filled(self, choice: Json, delta: TextDelta) -> Json:
        if self._request.logprobs:
            choice["logprobs"] = chat_logprobs(
                self._tokenizer,
                delta.tokens,
                self._request.top_logprobs or 0,
                by_id=bool(self._request.return_tokens_as_token_ids),
            )
        if delta.finish_reason is not None:
            has_calls = self._message(delta.index).has_calls
            choice["finish_reason"] = self._tool_use.mode.finish_reason(delta.finish_reason, has_calls=has_calls)
        choice["stop_reason"] = reported_stop(delta.matched_stop, self._planned.options)
        if self._request.return_token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
        return choice

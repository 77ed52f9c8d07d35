"""One choice of a call, from its deltas to chunks and, joined, to its complete message."""

from collections.abc import Iterator, Sequence

from cluster.text_generator import TextDelta
from cluster.text_request import PlannedText
from cluster.tools.call_parser import CallParser, read_calls
from cluster.tools.call_pieces import CallArguments, CallStart, Content, Piece, new_call_id
from cluster.tools.tool_use import ToolMode
from engine.executor import SampledToken
from kvtransfer.sampling_wire import prompt_logprobs_to_wire
from tandem.v1 import generation_pb2, sampling_pb2


class Choice:
    """A choice, as it grows.

    The choices of a call share their prompt: what was asked for of it, the first one tells.

    Args:
        stream: what each delta adds is told as well, not only all of it at the end.
        return_prompt_token_ids: whether they were asked for.
        mode: how free the model is to call tools.
        calls: finds the calls in its text; None: there are none to be found.
    """

    def __init__(
        self,
        planned: PlannedText,
        index: int,
        *,
        stream: bool,
        return_prompt_token_ids: bool,
        mode: ToolMode = ToolMode.NONE,
        calls: CallParser | None = None,
    ) -> None:
        self._request_id = planned.request_id
        self._index = index
        self._stream = stream
        self._num_prompt_tokens = len(planned.prompt_token_ids)
        self._prompt_token_ids = planned.prompt_token_ids if return_prompt_token_ids and index == 0 else ()
        self._prompt_logprobs: sampling_pb2.PromptLogprobs | None = None
        self._num_prompt_top = planned.options.prompt_logprobs
        self._num_top = planned.options.logprobs  # None: no log-probabilities
        self._mode = mode
        self._calls = calls
        self._texts: list[str] = []
        self._tool_calls: list[generation_pb2.ToolCall] = []
        self._tokens: list[SampledToken] = []
        self._is_told = False  # a chunk has been

    def responses(self, delta: TextDelta) -> Iterator[generation_pb2.GenerateResponse]:
        """What a delta of this choice makes the client hear."""
        pieces = read_calls(self._calls, delta.text, is_last=delta.finish_reason is not None)
        text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        tool_calls = self._called(pieces)
        self._texts.append(text)
        self._tokens.extend(delta.tokens)
        if self._index == 0 and delta.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs_to_wire(delta.prompt_logprobs, self._num_prompt_top or 0)
        if self._stream and (text or tool_calls or delta.tokens or self._has_prompt_to_tell):
            chunk = self._chunk(delta, text, tool_calls)
            yield generation_pb2.GenerateResponse(request_id=self._request_id, chunk=chunk)
            self._is_told = True
        if delta.finish_reason is not None:
            yield generation_pb2.GenerateResponse(request_id=self._request_id, complete=self._complete(delta))

    def _called(self, pieces: Sequence[Piece]) -> list[generation_pb2.ToolCallDelta]:
        """What the pieces add to calls: to each of them at most once."""
        deltas: dict[int, generation_pb2.ToolCallDelta] = {}
        for piece in pieces:
            match piece:
                case CallStart(index, name):
                    call_id = new_call_id()
                    self._tool_calls.append(generation_pb2.ToolCall(id=call_id, name=name))
                    deltas[index] = generation_pb2.ToolCallDelta(index=index, id=call_id, name=name)
                case CallArguments(index, text):
                    self._tool_calls[index].arguments += text
                    deltas.setdefault(index, generation_pb2.ToolCallDelta(index=index)).arguments += text
        return list(deltas.values())

    @property
    def _has_prompt_to_tell(self) -> bool:
        return not self._is_told and (self._prompt_logprobs is not None or len(self._prompt_token_ids) > 0)

    def _chunk(
        self, delta: TextDelta, text: str, tool_calls: Sequence[generation_pb2.ToolCallDelta]
    ) -> generation_pb2.GenerateStreamChunk:
        return generation_pb2.GenerateStreamChunk(
            token_ids=[token.token_id for token in delta.tokens],
            text=text,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(self._tokens),
            cached_tokens=delta.num_cached_tokens,
            index=self._index,
            logprobs=self._logprobs(delta.tokens),
            prompt_logprobs=None if self._is_told else self._prompt_logprobs,
            prompt_token_ids=() if self._is_told else self._prompt_token_ids,
            tool_calls=tool_calls,
        )

    def _complete(self, delta: TextDelta) -> generation_pb2.GenerateComplete:
        assert delta.finish_reason is not None, f"choice {self._index} has not ended"
        message = generation_pb2.GenerateComplete(
            output_ids=[token.token_id for token in self._tokens],
            text="".join(self._texts),
            finish_reason=self._mode.finish_reason(delta.finish_reason, has_calls=bool(self._tool_calls)),
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(self._tokens),
            cached_tokens=delta.num_cached_tokens,
            index=self._index,
            logprobs=self._logprobs(self._tokens),
            prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=self._prompt_token_ids,
            tool_calls=self._tool_calls,
        )
        if isinstance(delta.matched_stop, str):
            message.matched_stop_str = delta.matched_stop
        elif delta.matched_stop is not None:
            message.matched_token_id = delta.matched_stop
        return message

    def _logprobs(self, tokens: Sequence[SampledToken]) -> list[sampling_pb2.TokenLogprobs]:
        if self._num_top is None:
            return []
        return [
            sampling_pb2.TokenLogprobs(
                logprob=token.logprob or 0.0,
                top_token_ids=[token_id for token_id, _ in token.top[: self._num_top]],
                top_logprobs=[logprob for _, logprob in token.top[: self._num_top]],
            )
            for token in tokens
        ]

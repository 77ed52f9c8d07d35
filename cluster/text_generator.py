"""Text out of token sequences: what stands between the front doors and the generator.

A request's choices run side by side, each one sequence; its prompt is computed once. A choice's tokens pass a
detokenizer and a stop matcher; what leaves is a `TextDelta` for every step that brought tokens. A stop string ends its
choice: the sequence is closed, so that its worker stops, and the tokens after it count for nothing.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace

from cluster.call_record import recording
from cluster.errors import GenerationError, InvalidRequest
from cluster.generator import Generator, SequenceChunk, ServedModel, StageTimes
from cluster.interleave import interleave
from cluster.metrics import GatewayMetrics
from cluster.sequence_planner import SequencePlanner
from cluster.text.detokenizer import Detokenizer
from cluster.text.stop_strings import StopMatch, StopMatcher
from cluster.text_request import PlannedText, TextOptions, TextRequest
from engine.executor import SampledToken
from engine.sampling_params import FinishReason
from engine.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a step added to one choice. The text lags behind the tokens while it could still become a stop string."""

    index: int  # of the choice, among all of a call
    text: str
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None  # the last delta of its choice has one
    matched_stop: str | int | None = None  # the stop string, or the id of the stop token
    num_cached_tokens: int = 0  # of the prompt
    prefill_worker: str | None = None
    decode_worker: str | None = None
    stages: StageTimes | None = None
    # With the choice's first delta, if asked for: of the prompt's tokens, from the second on.
    prompt_logprobs: tuple[SampledToken, ...] | None = None


class OutputText:
    """The text of one sequence, as it grows: plain state, fed with chunks."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=options.skip_special_tokens, shown=options.shown_special_tokens
        )
        self._matcher = StopMatcher(options.stop, include_stop=options.include_stop_str_in_output)
        self._min_tokens = options.min_tokens
        self._shows_stop_token = options.include_stop_str_in_output
        self._num_tokens = 0

    def push(self, index: int, chunk: SequenceChunk) -> TextDelta:
        """The chunk as text; with a `finish_reason` of STOP if a stop string is complete in it."""
        text = ""
        for number, token in enumerate(chunk.tokens):
            self._num_tokens += 1
            is_last = number == len(chunk.tokens) - 1
            if is_last and chunk.matched_token_id is not None and not self._shows_stop_token:
                continue  # the stop token is no part of the text
            found = self._match(self._detokenizer.push([token.token_id]))
            if isinstance(found, StopMatch):
                return self._delta(index, text + found.text, chunk, number + 1, found.stop)
            text += found
        if chunk.finish_reason is not None:
            found = self._match(self._detokenizer.flush())
            if isinstance(found, StopMatch):
                return self._delta(index, text + found.text, chunk, len(chunk.tokens), found.stop)
            text += found + self._matcher.flush()
        return self._delta(index, text, chunk, len(chunk.tokens), None)

    def _match(self, text: str) -> str | StopMatch:
        # No stop string counts before min_tokens are there, as no stop token does.
        return text if self._num_tokens < self._min_tokens else self._matcher.push(text)

    def _delta(self, index: int, text: str, chunk: SequenceChunk, num_tokens: int, stop: str | None) -> TextDelta:
        return TextDelta(
            index=index,
            text=text,
            tokens=chunk.tokens[:num_tokens],
            finish_reason=chunk.finish_reason if stop is None else FinishReason.STOP,
            matched_stop=chunk.matched_token_id if stop is None else stop,
            num_cached_tokens=chunk.num_cached_tokens,
            prefill_worker=chunk.prefill_worker,
            decode_worker=chunk.decode_worker,
            stages=chunk.stages,
            prompt_logprobs=chunk.prompt_logprobs,
        )


class TextGenerator:
    """Continues prompts with text, over any `Generator`."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.generator = generator
        self.tokenizer = tokenizer
        self.planner = SequencePlanner(generator.model, tokenizer, clock=clock)
        self._metrics = metrics
        self._clock = clock

    @property
    def model(self) -> ServedModel:
        return self.generator.model

    async def plan(self, request: TextRequest) -> PlannedText:
        """What `run` needs; refuses what cannot be served before anything is started.

        Raises:
            InvalidRequest: see `SequencePlanner.plan`.
        """
        return (await self.plan_all((request,)))[0]

    async def plan_all(self, requests: Sequence[TextRequest]) -> list[PlannedText]:
        """Plans the prompts of one call; other calls go on between them.

        Raises:
            InvalidRequest: of a prompt, see `SequencePlanner.plan`; or all together are more than can ever be served.
        """
        # Before any work: each choice costs some, and a small body can ask for very many.
        num_choices = sum(request.options.n for request in requests)
        most = self.generator.max_concurrent
        if num_choices > most:
            raise InvalidRequest(
                f"a call may have at most {most} choices, not {num_choices} (n for each of {len(requests)} prompts)",
                param="n" if len(requests) <= most else requests[0].prompt_field,
            )
        planned: list[PlannedText] = []
        for request in requests:
            if planned:
                await asyncio.sleep(0)
            planned.append(await self.planner.plan(request))
        return planned

    async def run(self, planned: Sequence[PlannedText]) -> AsyncGenerator[TextDelta, None]:
        """Runs all choices of all prompts side by side; a choice's index counts through them, prompt by prompt.

        Wrap it in `contextlib.aclosing`: closing it aborts what still runs.

        Raises:
            GenerationError: there is no room for all, and none was started; or a sequence could not be started or
                finished, and the others are aborted.
        """
        sequences = [sequence for prompt in planned for sequence in prompt.sequences]
        async with AsyncExitStack() as stack:
            record = stack.enter_context(recording(planned))
            try:
                stack.enter_context(self.generator.admit(sequences))
            except GenerationError as error:
                self._metrics.count_error(type(error).__name__, len(sequences))
                raise
            streams: list[AsyncGenerator[TextDelta, None]] = []
            for prompt in planned:
                choices = self.generator.generate_choices(prompt.sequences) if prompt.sequences else []
                for chunks in choices:
                    # One that is not begun when the whole is closed is at a worker all the same, with the others.
                    stack.push_async_callback(chunks.aclose)
                streams += self._streams(len(streams), prompt, choices)
            async with aclosing(interleave(streams)) as deltas:
                async for delta in deltas:
                    record(delta)
                    yield delta

    def _streams(
        self, base: int, planned: PlannedText, choices: Sequence[AsyncGenerator[SequenceChunk, None]]
    ) -> list[AsyncGenerator[TextDelta, None]]:
        """One for each choice of a prompt; `base` is the index of the first."""
        if not choices:
            return [_nothing(base + index) for index in range(planned.options.n)]
        return [self._run(base + index, planned, chunks, is_first=index == 0) for index, chunks in enumerate(choices)]

    async def _run(
        self, index: int, planned: PlannedText, chunks: AsyncGenerator[SequenceChunk, None], *, is_first: bool
    ) -> AsyncGenerator[TextDelta, None]:
        output = OutputText(self.tokenizer, planned.options)
        # The prompt is computed once: it counts with the first of its choices.
        num_prompt_tokens = len(planned.prompt_token_ids) if is_first else 0
        with self._metrics.sequence(num_prompt_tokens, planned.arrival_time, self._clock) as timing:
            try:
                async with aclosing(chunks):
                    async for chunk in chunks:
                        delta = output.push(index, chunk if planned.options.max_tokens != 0 else _without_tokens(chunk))
                        timing.tokens(len(delta.tokens), delta.num_cached_tokens if is_first else 0)
                        if delta.finish_reason is not None:
                            timing.finished(delta.finish_reason.value)
                        if delta.text or delta.tokens or delta.finish_reason is not None:
                            yield delta
                        if delta.finish_reason is not None:
                            return
            except InvalidRequest as error:
                raise planned.options.structure_origin.named(error, planned.options.structure) from error


def _without_tokens(chunk: SequenceChunk) -> SequenceChunk:
    """What is to be said of a token that was generated only for what came with it."""
    return replace(chunk, tokens=(), finish_reason=FinishReason.LENGTH, matched_token_id=None)


async def _nothing(index: int) -> AsyncGenerator[TextDelta, None]:
    """A choice of no tokens."""
    yield TextDelta(index=index, text="", tokens=(), finish_reason=FinishReason.LENGTH)

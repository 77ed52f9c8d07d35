"""From a request for text to sequences of tokens.

`SequencePlanner.plan` checks a `TextRequest` against the served model, tokenizes its prompt and resolves every default,
so that what is refused is refused before anything runs; the outcome is a `PlannedText`: one `SequenceRequest` for each
of its `n` choices.
"""

import asyncio
import hashlib
import math
import secrets
from collections.abc import Callable

from cluster.errors import InvalidRequest
from cluster.generator import SequenceRequest, ServedModel, check_priority
from cluster.text_request import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    PlannedText,
    TextOptions,
    TextRequest,
)
from engine.sampling_params import SamplingParams
from engine.structure.spec import Structure
from engine.tokenizer.tokenizer import Tokenizer

_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
_FLOAT32_MIN = 2.0**-149  # the least above 0
# Longer texts are tokenized in a thread: some milliseconds, in which other requests' tokens would have to wait.
_INLINE_CHARACTERS = 4096


class SequencePlanner:
    """Turns requests for text into sequences for one served model."""

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        *,
        clock: Callable[[], float],
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64) - 2**63,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._clock = clock
        self._draw_seed = draw_seed

    async def plan(self, request: TextRequest) -> PlannedText:
        """Checks, tokenizes, resolves.

        Raises:
            InvalidRequest: the request cannot be served by this model; `param` names the field.
        """
        arrival_time = self._clock()
        options = request.options
        self._check(options)
        token_ids = await self._tokenize(request)
        max_tokens = self._max_tokens(len(token_ids), request)
        sequences = self._sequences(request, token_ids, max_tokens)
        return PlannedText(
            request_id=request.request_id,
            options=options,
            prompt=request.prompt if isinstance(request.prompt, str) else None,
            prompt_token_ids=token_ids,
            sequences=sequences,
            arrival_time=arrival_time,
        )

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """The token ids of a text that may be a prompt here; long ones in a thread.

        Raises:
            InvalidRequest: it is longer than any prompt of this model, or is not Unicode.
        """
        # Before any work: no token stands for more bytes than the longest one, and a character is at least a byte.
        if len(text) > self._model.max_model_len * self._tokenizer.max_token_bytes:
            raise InvalidRequest(
                f"the prompt is too long: {param} has {len(text)} characters, and this model's maximum context length "
                f"is {self._model.max_model_len} tokens",
                param=param,
                code="context_length_exceeded",
            )
        try:
            if len(text) <= _INLINE_CHARACTERS:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        except ValueError as exc:
            raise InvalidRequest(f"{param}: {exc}", param=param) from exc

    async def _tokenize(self, request: TextRequest) -> tuple[int, ...]:
        if isinstance(request.prompt, str):
            token_ids = await self.tokenize(
                request.prompt, add_special_tokens=request.add_special_tokens, param=request.prompt_field
            )
        else:
            token_ids = list(request.prompt)
            # Not one by one: prompts can be long, and nearly all are right. One too long is refused for its length.
            if token_ids and len(token_ids) <= self._model.max_model_len:
                self._check_token_id(min(token_ids), request.prompt_field)
                self._check_token_id(max(token_ids), request.prompt_field)
        if not token_ids:
            field_name = request.prompt_field
            raise InvalidRequest(f"{field_name} is empty: it must have at least one token", param=field_name)
        return tuple(token_ids)

    def _max_tokens(self, num_prompt_tokens: int, request: TextRequest) -> int:
        context = self._model.max_model_len
        room = context - num_prompt_tokens
        max_tokens = request.options.max_tokens
        if max_tokens is None:
            max_tokens = max(room, 1)  # at least one token, or the request makes no sense
        if max(max_tokens, self._num_hidden(request.options)) > room:
            # LangChain and LiteLLM know this error by words of its message alone: "prompt is too long" and
            # "this model's maximum context length is".
            what = "the prompt is too long" if num_prompt_tokens >= context else "max_tokens is too high"
            raise InvalidRequest(
                f"{what}: this model's maximum context length is {context} tokens; the prompt has {num_prompt_tokens}, "
                f"and up to {max_tokens} more are asked for",
                param="max_tokens" if num_prompt_tokens < context else request.prompt_field,
                code="context_length_exceeded",
            )
        return max_tokens

    def _num_hidden(self, options: TextOptions) -> int:
        """Tokens that are generated although none are asked for: a prompt's log-probabilities come with its first."""
        return int(options.max_tokens == 0 and options.prompt_logprobs is not None)

    def _check(self, options: TextOptions) -> None:
        if not 1 <= options.n <= MAX_CHOICES:
            raise InvalidRequest(f"n must be in [1, {MAX_CHOICES}], not {options.n}", param="n")
        if options.max_tokens is not None and options.max_tokens < 0:
            raise InvalidRequest(f"max_tokens must not be negative, and is {options.max_tokens}", param="max_tokens")
        if options.structure is not None:
            _check_structure(options.structure, options)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(options, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise InvalidRequest(f"{name} must be in [0, {MAX_LOGPROBS}], not {value}", param=name)
        _check_count("stop", len(options.stop), "strings", MAX_STOPS)
        longest = max(map(len, options.stop), default=0)
        if longest > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop has a string of {longest} characters; at most {MAX_STOP_CHARACTERS} are allowed", param="stop"
            )
        _check_count("stop_token_ids", len(options.stop_token_ids), "ids", MAX_STOP_TOKEN_IDS)
        for token_id in options.stop_token_ids:
            self._check_token_id(token_id, "stop_token_ids")
        _check_count("logit_bias", len(options.logit_bias), "tokens", MAX_LOGIT_BIAS)
        for token_id in options.logit_bias:
            self._check_token_id(token_id, "logit_bias")
        _check_width(
            "temperature", options.temperature, least=0.0
        )  # less is 0 to a worker: as greedy as it means to be
        _check_width("repetition_penalty", options.repetition_penalty, least=_FLOAT32_MIN)
        check_priority(options.priority)

    def _check_token_id(self, token_id: int, param: str) -> None:
        if not 0 <= token_id < self._model.vocab_size:
            raise InvalidRequest(
                f"{param} has the token id {token_id}; the model's ids are 0 to {self._model.vocab_size - 1}",
                param=param,
            )

    def _sequences(
        self, request: TextRequest, token_ids: tuple[int, ...], max_tokens: int
    ) -> tuple[SequenceRequest, ...]:
        options = request.options
        seed = wrapped_seed(self._draw_seed() if options.seed is None else options.seed)
        stop_token_ids = set(options.stop_token_ids)
        if not options.ignore_eos:
            stop_token_ids |= self._tokenizer.eos_token_ids
        # The same objects for all choices: they can be large, and whoever looks at them need do so but once.
        sorted_stop_token_ids = tuple(sorted(stop_token_ids))
        logit_bias = dict(options.logit_bias)
        try:
            all_params = [
                SamplingParams(
                    max_tokens=max(max_tokens, 1),
                    temperature=options.temperature,
                    top_p=options.top_p,
                    top_k=options.top_k,
                    min_p=options.min_p,
                    repetition_penalty=options.repetition_penalty,
                    presence_penalty=options.presence_penalty,
                    frequency_penalty=options.frequency_penalty,
                    logit_bias=logit_bias,
                    seed=choice_seed(seed, index),
                    logprobs=options.logprobs,
                    prompt_logprobs=options.prompt_logprobs,
                    structure=options.structure,
                    min_tokens=options.min_tokens,
                    stop_token_ids=sorted_stop_token_ids,
                )
                for index in range(options.n)
            ]
        except ValueError as exc:  # its messages begin with the field
            raise InvalidRequest(str(exc), param=str(exc).partition(" ")[0]) from exc
        if max_tokens + self._num_hidden(options) == 0:
            return ()
        return tuple(
            SequenceRequest(
                request_id=f"{request.request_id}-{index}",
                prompt_token_ids=token_ids,
                params=params,
                cache_salt=options.cache_salt,
                priority=options.priority,
                timeout_s=options.timeout_s,
            )
            for index, params in enumerate(all_params)
        )


def _check_count(name: str, count: int, what: str, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{name} has {count} {what}; at most {most} are allowed", param=name)


def _check_structure(structure: Structure, options: TextOptions) -> None:
    if options.ignore_eos:
        raise InvalidRequest(
            "ignore_eos must not be true for a text that is held to a structure: it ends where the structure does",
            param="ignore_eos",
        )
    try:
        structure.check_text()
    except ValueError as exc:
        raise options.structure_origin.named(InvalidRequest(str(exc)), structure) from exc


def _check_width(name: str, value: float, *, least: float) -> None:
    """Refuses a finite value that workers, who are told in 32 bits, would take for infinity or zero.

    Only what may be of any size needs it; other numbers are checked against their own, narrower, ranges.
    """
    if _FLOAT32_MAX < value < math.inf:
        raise InvalidRequest(f"{name} must be at most {_FLOAT32_MAX:g}, not {value:g}", param=name)
    if 0.0 < value < least:
        raise InvalidRequest(f"{name} must be at least {least:g}, not {value:g}", param=name)


def choice_seed(seed: int, index: int) -> int:
    """The seed of a request's choice: the request's own for the first, others as if drawn, but always the same."""
    if index == 0:
        return seed
    key = seed.to_bytes(8, "little", signed=True) + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)


def wrapped_seed(seed: int) -> int:
    """Any integer as a signed 64-bit one; those that are keep their value."""
    return (seed + 2**63) % 2**64 - 2**63

"""What a call was and what came of it: begun at a front door, written while it is served, told to all who keep account.

A record's life: begun with the call's context, before anything of it is read; `planned` once it is known what is
asked; every delta `add`ed; its status set by the front door; ended, and handed to the sinks, whatever it ended with.
Writing it costs a few attributes: what sinks do with it, a line of a log or spans of a trace, is done after the call.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from cluster.call_context import CallContext
from cluster.errors import GenerationError
from cluster.generator import StageTimes
from worker import log

if TYPE_CHECKING:
    from cluster.text_generator import TextDelta
    from cluster.text_request import PlannedText, TextOptions

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """One choice's last delta."""

    index: int  # among all of the call
    at: float  # when it came
    finish_reason: str
    stages: StageTimes | None


@dataclass(slots=True)
class CallRecord:
    """One call. Times are monotonic seconds; `wall` makes them times of day. No text of prompt or answer is kept."""

    context: CallContext
    transport: Literal["http", "grpc"]
    method: str  # HTTP's; of gRPC POST
    path: str  # without the query; of gRPC /package.Service/Method
    started_at: float
    wall_offset: float  # of a time of day to a monotonic time
    clock: Clock = field(repr=False)
    ended_at: float | None = None
    status: int | str | None = None  # HTTP's number, or the name of gRPC's code
    client_gone: bool = False  # it left before the end
    error: Exception | None = None
    # Of a call that generates:
    is_conversation: bool = False  # its prompt, where one path takes both; known even if it was refused
    generation_id: str | None = None  # in the ids that its workers know it by
    answer_id: str | None = None  # what the answer's objects are called
    options: "TextOptions | None" = None
    num_choices: int = 0
    num_prompt_tokens: int = 0  # a prompt counts once, however many choices continue it
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    first_token_at: float | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    ends: list[ChoiceEnd] = field(default_factory=list)
    _cached_of: dict[int, int] = field(default_factory=dict, repr=False)  # by index of each prompt's first choice

    @property
    def duration_s(self) -> float:
        return (self.clock() if self.ended_at is None else self.ended_at) - self.started_at

    def wall(self, at: float) -> float:
        """A time of this record as seconds since 1970."""
        return self.wall_offset + at

    def planned(self, prompts: "Sequence[PlannedText]") -> None:
        """What the call asks for."""
        self.generation_id, self.options = prompts[0].request_id, prompts[0].options
        self.num_choices, self._cached_of = 0, {}
        for prompt in prompts:
            self._cached_of[self.num_choices] = 0
            self.num_choices += prompt.options.n
        self.num_prompt_tokens = sum(len(prompt.prompt_token_ids) for prompt in prompts)

    def add(self, delta: "TextDelta") -> None:
        """What has come for one choice."""
        if delta.tokens:
            self.num_completion_tokens += len(delta.tokens)
            if self.first_token_at is None:
                self.first_token_at = self.clock()
        if delta.index in self._cached_of:
            self._cached_of[delta.index] = delta.num_cached_tokens
        if delta.finish_reason is not None:
            self.ends.append(ChoiceEnd(delta.index, self.clock(), delta.finish_reason.value, delta.stages))
            self.num_cached_tokens = sum(self._cached_of.values())
            self.prefill_worker = delta.prefill_worker or self.prefill_worker
            self.decode_worker = delta.decode_worker or self.decode_worker


current_call: ContextVar[CallRecord | None] = ContextVar("current_call", default=None)

Sink = Callable[[CallRecord], None]


class CallRecorder:
    """Begins and ends records.

    Args:
        sinks: told of each call that has ended; they do not fail.
        clock: monotonic seconds.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self, sinks: Sequence[Sink] = (), *, clock: Clock = time.monotonic, wall_clock: Clock = time.time
    ) -> None:
        self._sinks = tuple(sinks)
        self._clock = clock
        self._wall_clock = wall_clock

    @contextmanager
    def call(
        self, context: CallContext, transport: Literal["http", "grpc"], method: str, path: str
    ) -> Iterator[CallRecord]:
        """The record of a call, which is the current one within; all that is logged there has its id."""
        now = self._clock()
        record = CallRecord(
            context=context,
            transport=transport,
            method=method,
            path=path,
            started_at=now,
            wall_offset=self._wall_clock() - now,
            clock=self._clock,
        )
        current_call.set(record)
        log.request_id.set(context.request_id)
        try:
            yield record
        finally:
            record.ended_at = self._clock()
            for sink in self._sinks:
                sink(record)
            # Not by their tokens: a generator may be closed in another context than it was begun in.
            current_call.set(None)
            log.request_id.set(None)


def rename_call(context: CallContext) -> None:
    """The current call is known by this context from now on: its message has named it."""
    record = current_call.get()
    if record is not None:
        record.context = context
        log.request_id.set(context.request_id)


def call_is_conversation() -> None:
    """The current call's prompt is a conversation."""
    record = current_call.get()
    if record is not None:
        record.is_conversation = True


def name_answer(answer_id: str) -> None:
    """What the current call's answer is called."""
    record = current_call.get()
    if record is not None:
        record.answer_id = answer_id


@contextmanager
def recording(prompts: "Sequence[PlannedText]") -> Iterator[Callable[["TextDelta"], None]]:
    """Writes what is generated for the current call into its record; yields what each delta is to be told to."""
    record = current_call.get()
    if record is None:
        yield _nobody
        return
    record.planned(prompts)
    try:
        yield record.add
    except GenerationError as exc:
        record.error = exc
        raise


def _nobody(delta: "TextDelta") -> None:
    """Outside of any call."""

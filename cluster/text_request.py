"""A request for text, as all front doors see it, and the sequences of tokens it comes down to.

HTTP and gRPC both translate into a `TextRequest`. A `SequencePlanner` makes a `PlannedText` of it, or refuses it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.generator import SequenceRequest
from cluster.structure_origin import StructureOrigin
from engine.structure.spec import Structure

MAX_CHOICES = 128  # n; OpenAI's bound
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024  # tokens; they go to a worker with every prompt, and are told one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How to continue a prompt; the defaults are what an absent field means."""

    n: int = 1
    max_tokens: int | None = None  # None: to the end of the model's context
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: one is drawn
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structure: Structure | None = None  # what the text is held to
    structure_origin: StructureOrigin = field(default_factory=StructureOrigin)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[int, ...] = ()  # but for these, which the text cannot be read without
    include_stop_str_in_output: bool = False
    cache_salt: str = ""
    priority: int = 0
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A prompt, as text or as token ids, and how to continue it."""

    request_id: str
    prompt: str | Sequence[int]
    options: TextOptions = field(default_factory=TextOptions)
    add_special_tokens: bool = True  # to a prompt of text; a chat template has put them in already
    prompt_field: str = "prompt"  # what errors call it


@dataclass(frozen=True, slots=True)
class PlannedText:
    """A request that can run: checked, tokenized, every default resolved."""

    request_id: str
    options: TextOptions
    prompt: str | None  # its text, if it came as text
    prompt_token_ids: tuple[int, ...]
    # One a choice; none if no token may be generated (max_tokens 0), unless the prompt's log-probabilities are wanted:
    # then each generates one token, which is not shown.
    sequences: tuple[SequenceRequest, ...]
    arrival_time: float


def reported_stop(matched: str | int | None, options: TextOptions) -> str | int | None:
    """Which of the caller's own stops ended a choice; the model's end of sequence is none of them."""
    return matched if isinstance(matched, str) or matched in options.stop_token_ids else None

"""The fields that both kinds of completion have: what each may be, and what its absence means.

Numbers are taken strictly: 1.5 or "3" is no count, true is no number. null is absent. Unknown fields are ignored, as
clients send all sorts of them; but a field that asks for something that cannot be done here is refused by name.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError

from cluster.call_context import ID_PATTERN
from cluster.errors import InvalidRequest
from cluster.openai.field_schemas import RESPONSE_FORMAT_SCHEMA
from cluster.openai.structure_fields import STRUCTURE_FIELDS, requested_structure
from cluster.openai.unsupported import UNSUPPORTED, refuse_unsupported
from cluster.quotation import shorten
from cluster.structure_origin import StructureOrigin
from cluster.text_request import MAX_CHOICES, MAX_LOGPROBS, TextOptions
from engine.structure.spec import Structure

Int = Annotated[int, Strict()]
Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
V = TypeVar("V")


def wrong(message: str) -> PydanticCustomError:
    """A value that is not allowed; `message` goes on from the field's name."""
    return PydanticCustomError("wrong", "{message}", {"message": message})  # braces would be read as a template


def _strings(value: Any) -> Any:
    """`stop`: one string or a list of them; empty ones stop nothing."""
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return ()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise wrong("must be a string or a list of strings")
    return tuple(text for text in texts if text)


def _biases(value: Any) -> Any:
    """`logit_bias`: token ids, which JSON writes as strings, to numbers."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("must be an object of token ids and numbers")
    biases = {}
    for key, bias in value.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            raise wrong(f"must have token ids as keys, not {shorten(key)}")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise wrong(f"must have numbers as values, not {shorten(bias)}")
        if not -100 <= bias <= 100:
            raise wrong(f"must have values in [-100, 100], not {shorten(bias)}")
        biases[int(key)] = float(bias)
    return biases


Stop = Annotated[
    tuple[str, ...],
    BeforeValidator(_strings),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_biases),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
                {"type": "null"},
            ]
        }
    ),
]


ResponseFormat = Annotated[Any, WithJsonSchema(RESPONSE_FORMAT_SCHEMA)]
JsonSchema = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]})]


class UsageChunks(Enum):
    """Which chunks of a stream tell the usage."""

    NONE = "none"
    LAST = "last"  # one of its own, after all others
    ALL = "all"  # and each other tells what it has come to so far


class StreamOptions(BaseModel):
    """What a stream tells beside the text."""

    include_usage: Flag | None = None
    include_obfuscation: Flag | None = None  # OpenAI's padding of events; there is none here
    continuous_usage_stats: Flag | None = None  # vLLM's: with every chunk, what it has come to so far


class RequestFields(BaseModel):
    """Fields of `/v1/completions` and `/v1/chat/completions` alike."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    unsupported: ClassVar[Mapping[str, str]] = UNSUPPORTED

    model: Text
    n: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[Float, Field(ge=0)] | None = None
    top_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: Int | None = None
    stop: Stop = ()
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None

    # Beyond OpenAI's: names and meanings are vLLM's.
    top_k: Annotated[Int, Field(ge=-1)] | None = None
    min_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Float, Field(gt=0)] | None = None
    min_tokens: Annotated[Int, Field(ge=0)] | None = None
    ignore_eos: Flag | None = None
    stop_token_ids: list[Int] | None = None
    skip_special_tokens: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    cache_salt: Text | None = None
    priority: Int | None = None
    return_token_ids: Flag | None = None
    return_tokens_as_token_ids: Flag | None = None
    prompt_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    request_id: Annotated[Text, Field(pattern=f"^{ID_PATTERN}$")] | None = None  # shown as the reply's id

    # What the text is held to: see `structure_fields`.
    response_format: ResponseFormat = None
    guided_json: JsonSchema = None
    guided_regex: Annotated[Text, Field(min_length=1)] | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1)] | None = None
    guided_grammar: Annotated[Text, Field(min_length=1)] | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def usage_chunks(self) -> UsageChunks:
        """Which chunks of a stream tell the usage."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return UsageChunks.NONE
        return UsageChunks.ALL if options.continuous_usage_stats else UsageChunks.LAST

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """From a request's JSON object.

        Raises:
            InvalidRequest: names the field, its value and what is allowed.
        """
        refuse_unsupported(body, cls.unsupported)
        if not body.get("stream") and body.get("stream_options") is not None:
            raise InvalidRequest("stream_options is allowed only with stream: true", param="stream_options")
        try:
            return cls.model_validate(body)
        except ValidationError as exc:
            raise problem(exc.errors(include_url=False)[0]) from exc

    def structure(self) -> tuple[str, Structure | None]:
        """What the text is held to, behind the field that says so.

        Raises:
            InvalidRequest: names the field.
        """
        return requested_structure({name: getattr(self, name) for name in STRUCTURE_FIELDS}) or ("structure", None)

    def text_options(
        self,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        structure: Structure | None,
        structure_origin: StructureOrigin,
        shown_special_tokens: tuple[int, ...] = (),
    ) -> TextOptions:
        """How to continue a prompt."""
        return TextOptions(
            n=self.num_choices,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=max(self.top_k or 0, 0),  # vLLM's -1 is our 0: all
            min_p=self.min_p or 0.0,
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias,
            seed=self.seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structure=structure,
            structure_origin=structure_origin,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=_or(self.skip_special_tokens, True),
            shown_special_tokens=shown_special_tokens,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
        )


def _or(value: V | None, default: V) -> V:
    return default if value is None else value


def _sentence(error: ErrorDetails) -> str:
    """What is wrong, going on from the field's name: pydantic's words, where they are a caller's."""
    match error["type"]:
        case "wrong":
            return error["msg"]
        case "too_short":
            return f"must have at least {error['ctx']['min_length']} item"  # no list here needs more
        case "string_too_short":
            return "must not be empty"
        case "string_pattern_mismatch":
            return f"must match {error['ctx']['pattern']}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "must be an object"
    return error["msg"].replace("Input should be", "must be")


def problem(error: ErrorDetails) -> InvalidRequest:
    """One of pydantic's errors in a sentence."""
    path = ""
    for step in error["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    if error["type"] == "missing":
        return InvalidRequest(f"{path} is missing", param=path, code="missing_required_parameter")
    message = _sentence(error)
    value = "" if error["type"] == "wrong" else f", not {shorten(error['input'])}"
    return InvalidRequest(f"{path} {message}{value}", param=path)

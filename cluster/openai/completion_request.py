"""What `/v1/completions` takes."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, WithJsonSchema

from cluster.errors import InvalidRequest
from cluster.openai.request_fields import Flag, Int, RequestFields, Text, wrong
from cluster.openai.unsupported import UNSUPPORTED_IN_COMPLETIONS
from cluster.quotation import shorten
from cluster.structure_origin import StructureOrigin
from cluster.text_request import TextRequest

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 2048

Prompt = str | tuple[int, ...]


def _prompts(value: Any) -> Any:
    """A text, a list of texts, a list of token ids, or a list of such lists: always as a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wrong("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
    if not value:
        raise wrong("must not be an empty list")
    if _are_token_ids(value):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise wrong(f"must have at most {MAX_PROMPTS} prompts, not {len(value)}")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    for item in value:
        if not isinstance(item, list) or not _are_token_ids(item):
            raise wrong(f"must hold only strings, only token ids, or only lists of token ids, not {shorten(value)}")
        if not item:
            raise wrong("must not hold an empty list of token ids")
    return tuple(tuple(item) for item in value)


def _are_token_ids(values: list[Any]) -> bool:
    # The exact type: true and false are integers to Python. In C, because prompts can be long.
    return set(map(type, values)) <= {int}


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

Prompts = Annotated[
    tuple[Prompt, ...],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]


class CompletionRequest(RequestFields):
    """The body of `/v1/completions`."""

    unsupported: ClassVar[Mapping[str, str]] = UNSUPPORTED_IN_COMPLETIONS

    prompt: Prompts
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    echo: Flag | None = None
    logprobs: Annotated[Int, Field(ge=0, le=5)] | None = None
    best_of: Annotated[Int, Field(ge=1)] | None = None
    add_special_tokens: Flag | None = None
    suffix: Text | None = None

    def text_requests(self, request_id: str) -> list[TextRequest]:
        """One for each prompt.

        Raises:
            InvalidRequest: a combination that is not supported.
        """
        if self.best_of is not None and self.best_of != self.num_choices:
            raise InvalidRequest(
                f"best_of must equal n ({self.num_choices}), not {self.best_of}: choosing among more is not supported",
                param="best_of",
                code="unsupported_parameter",
            )
        # Whoever wants the log-probabilities of a text that begins with the prompt wants the prompt's as well.
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        wanted = [number for number in asked if number is not None]
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        field_name, structure = self.structure()
        options = self.text_options(
            max_tokens=max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=max(wanted) if wanted else None,
            structure=structure,
            structure_origin=StructureOrigin(field_name),
        )
        return [
            TextRequest(
                request_id=f"{request_id}-{number}",
                prompt=prompt,
                options=options,
                add_special_tokens=self.add_special_tokens is not False,
            )
            for number, prompt in enumerate(self.prompt)
        ]

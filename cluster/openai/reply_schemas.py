"""What replies look like, for the API description alone: they are made as plain objects, which cost less.

That replies are as described is tested by requests made from the description.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field

Schema = dict[str, Any]


class ErrorObject(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None = Field(description="The field that is to blame, if there is one.")
    code: str | None


class ErrorReply(BaseModel):
    """Every error."""

    error: ErrorObject


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(ge=0, description="Tokens of the prompt that were not computed again.")


class Usage(BaseModel):
    """A prompt counts once, however many choices continue it."""

    prompt_tokens: int = Field(ge=1)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=1)
    prompt_tokens_details: PromptTokensDetails


class _Reply(BaseModel):
    id: str
    created: int = Field(description="Seconds since 1970.")
    model: str
    system_fingerprint: str
    usage: Usage


class _Choice(BaseModel):
    index: int = Field(ge=0)
    stop_reason: str | int | None = Field(description="The stop string or token id that ended it.")
    token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    prompt_logprobs: list[dict[str, Any] | None] | None = Field(
        None, description="With prompt_logprobs; in the first choice of each prompt."
    )


class CompletionLogprobs(BaseModel):
    """Lists beside each other, an item a token; null where nothing is known: of a prompt's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class CompletionReply(_Reply):
    """The reply of `/v1/completions`; choices are in the order of the prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice] = Field(min_length=1)


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChosenLogprob]
    refusal: None


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatReply(_Reply):
    """The reply of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice] = Field(min_length=1)


class ModelObject(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelObject]


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(BaseModel):
    prompt: str


class HealthReply(BaseModel):
    status: Literal["ok", "no worker"]


class VersionReply(BaseModel):
    version: str


class MetricsTarget(BaseModel):
    targets: list[str]
    labels: dict[str, str]


ERRORS: dict[int | str, Schema] = {
    "4XX": {"model": ErrorReply, "description": "What was asked for is wrong, not allowed, not there or too much."},
    "5XX": {"model": ErrorReply, "description": "It cannot be served now."},
}


def takes(body: type[BaseModel]) -> Schema:
    """A body for an operation's description: it is read by hand, so that every error looks alike."""
    schema = body.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def gives(reply: Any, *, streams: bool = False) -> dict[int | str, Schema]:
    """The reply to a request that is all right, for an operation's description."""
    described: Schema = {"model": reply, "description": "Served."}
    if streams:
        events = "With stream: an event for each chunk, `data: ` and its object, and `data: [DONE]` at the end."
        described["content"] = {"text/event-stream": {"schema": {"description": events}}}
    return {200: described}


def _inlined(schema: Any, definitions: Schema) -> Any:
    """The schema without references: within an operation's description `#` is the whole API's, not the schema's."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        return _inlined(definitions[reference.removeprefix("#/$defs/")], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}

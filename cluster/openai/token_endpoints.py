"""`/tokenize` and `/detokenize`: what a text is to the model, and back. Fields and replies are vLLM's."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ValidationError, WithJsonSchema

from cluster.detokenize import detokenize as text_of_tokens
from cluster.errors import InvalidRequest
from cluster.openai.chat_request import Tools
from cluster.openai.field_schemas import MESSAGES_SCHEMA
from cluster.openai.request_fields import Flag, Int, Text, problem
from cluster.openai.server import ApiServer
from cluster.text.messages import parse_messages
from cluster.tools.conversation import render_conversation
from cluster.tools.tool import parse_tools


class _TokenFields(BaseModel):
    model: Text | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises `InvalidRequest`, which names the field."""
        try:
            return cls.model_validate(body)
        except ValidationError as exc:
            raise problem(exc.errors(include_url=False)[0]) from exc


class TokenizeRequest(_TokenFields):
    """A text, or a conversation as the model would see it."""

    prompt: Text | None = None
    messages: Annotated[list[Any], Field(min_length=1), WithJsonSchema(MESSAGES_SCHEMA)] | None = None
    add_special_tokens: Flag | None = None  # absent: to a prompt, but not to a conversation
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    tools: Tools = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Flag = False


class DetokenizeRequest(_TokenFields):
    """Token ids."""

    tokens: list[Int]


async def tokenize(server: ApiServer, fields: TokenizeRequest) -> dict[str, Any]:
    """The reply of `/tokenize`."""
    if fields.model is not None:
        server.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequest("either prompt or messages must be given, and not both", param="prompt")
    if fields.prompt is not None:
        text, field, adds = fields.prompt, "prompt", True
    else:
        text = render_conversation(
            server.template(),
            parse_messages(fields.messages),
            parse_tools(fields.tools),
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            variables=fields.chat_template_kwargs,
        )
        field, adds = "messages", False
    if fields.add_special_tokens is not None:
        adds = fields.add_special_tokens
    token_ids = await server.text.planner.tokenize(text, add_special_tokens=adds, param=field)
    return {
        "count": len(token_ids),
        "max_model_len": server.text.model.max_model_len,
        "tokens": token_ids,
        "token_strs": server.text.tokenizer.raw_tokens(token_ids) if fields.return_token_strs else None,
    }


async def detokenize(server: ApiServer, fields: DetokenizeRequest) -> dict[str, Any]:
    """The reply of `/detokenize`."""
    if fields.model is not None:
        server.check_model(fields.model)
    return {"prompt": await text_of_tokens(server.text, fields.tokens)}

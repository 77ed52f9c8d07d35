"""What `/v1/chat/completions` takes."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from cluster.errors import InvalidRequest
from cluster.openai.field_schemas import MESSAGES_SCHEMA, TOOL_CHOICE_SCHEMA, TOOLS_SCHEMA
from cluster.openai.request_fields import Flag, Int, RequestFields, Text
from cluster.openai.unsupported import UNSUPPORTED_IN_CHAT
from cluster.text.chat_template import ChatTemplate
from cluster.text.messages import parse_messages
from cluster.text_request import TextOptions
from cluster.tools.answer_structure import answer_origin, answer_structure
from cluster.tools.call_style import CallStyle, markup_token_ids
from cluster.tools.conversation import render_conversation
from cluster.tools.tool_use import ToolMode, ToolUse, parse_tool_use
from engine.tokenizer.tokenizer import Tokenizer

Messages = Annotated[list[Any], Field(min_length=1), WithJsonSchema(MESSAGES_SCHEMA)]
Tools = Annotated[Any, WithJsonSchema(TOOLS_SCHEMA)]
ToolChoice = Annotated[Any, WithJsonSchema(TOOL_CHOICE_SCHEMA)]


class ChatRequest(RequestFields):
    """The body of `/v1/chat/completions`."""

    unsupported: ClassVar[Mapping[str, str]] = UNSUPPORTED_IN_CHAT

    messages: Messages
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=0)] | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Flag | None = None
    modalities: list[Text] | None = None
    reasoning_effort: Text | None = None  # the template's business, where it has one

    # vLLM's.
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    add_special_tokens: Flag | None = None  # absent: the template has put them in
    chat_template_kwargs: dict[str, Any] | None = None  # variables for the template
    documents: list[dict[str, Any]] | None = None  # one of them

    def tool_use(self) -> ToolUse:
        """What the model may do with tools.

        Raises:
            InvalidRequest: names the field.
        """
        return parse_tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def render(self, template: ChatTemplate, tool_use: ToolUse) -> str:
        """The conversation as one prompt.

        Raises:
            InvalidRequest: messages that are none, or that the template refuses.
        """
        if self.modalities and set(self.modalities) != {"text"}:
            raise InvalidRequest('modalities must be ["text"]: this model writes text', param="modalities")
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "continue_final_message is not allowed together with add_generation_prompt: the model goes on with "
                "the last message, or begins one of its own",
                param="continue_final_message",
            )
        own = {"reasoning_effort": self.reasoning_effort, "documents": self.documents}
        return render_conversation(
            template,
            parse_messages(self.messages),
            tool_use.tools,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            variables={name: value for name, value in own.items() if value is not None}
            | (self.chat_template_kwargs or {}),
        )

    def options(self, tool_use: ToolUse, style: CallStyle, tokenizer: Tokenizer) -> TextOptions:
        """How to continue the conversation.

        Args:
            style: how the model writes calls.

        Raises:
            InvalidRequest: a combination that means nothing.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is allowed only with logprobs: true", param="top_logprobs")
        # max_tokens is the older name of the same thing.
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        field_name, content = self.structure()
        structure = answer_structure(tool_use, content, style, tokenizer, content_field=field_name)
        return self.text_options(
            max_tokens=max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            structure=structure,
            structure_origin=answer_origin(tool_use, content, structure, content_field=field_name),
            shown_special_tokens=markup_token_ids(tokenizer, style) if tool_use.mode is ToolMode.AUTO else (),
        )

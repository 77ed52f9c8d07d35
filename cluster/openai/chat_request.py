"""What `/v1/chat/completions` takes."""

from typing import Annotated, Any

from pydantic import Field

from cluster.errors import InvalidRequest
from cluster.openai.messages import parse_messages, parse_tools
from cluster.openai.request_fields import Flag, Int, RequestFields
from cluster.text.chat_template import ChatTemplate
from cluster.text_request import TextOptions


class ChatRequest(RequestFields):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Any], Field(min_length=1)]
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=0)] | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: Any = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's: variables for the template

    def render(self, template: ChatTemplate) -> str:
        """The conversation as one prompt.

        Raises:
            InvalidRequest: messages that are none, or that the template refuses.
        """
        return template.render(
            parse_messages(self.messages),
            tools=parse_tools(self.tools, self.tool_choice),
            variables=self.chat_template_kwargs,
        )

    def options(self) -> TextOptions:
        """How to continue the conversation.

        Raises:
            InvalidRequest: a combination that means nothing.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is allowed only with logprobs: true", param="top_logprobs")
        # max_tokens is the older name of the same thing.
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.text_options(max_tokens=max_tokens, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

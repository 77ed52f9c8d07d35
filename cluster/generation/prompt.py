"""The prompt of a call: token ids as they are, a text, or a conversation by way of the model's chat template."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.call_record import call_is_conversation
from cluster.errors import InvalidRequest, ModelNotFound
from cluster.generation.chat import json_object, openai_messages, openai_tool_choice, openai_tools
from cluster.text.chat_template import ChatTemplate
from cluster.text.messages import parse_messages
from cluster.text_generator import TextGenerator
from cluster.tools.answer_structure import answer_structure
from cluster.tools.call_parser import CallParser, call_parser
from cluster.tools.call_style import call_style, markup_token_ids
from cluster.tools.conversation import render_conversation
from cluster.tools.tool_use import ToolMode, ToolUse, parse_tool_use
from engine.structure.spec import Structure
from tandem.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a call continues.

    Attributes:
        name: what errors call it.
        add_special_tokens: to a text.
        tool_use: what the model may call and must.
        shown_special_tokens: those that calls are written with: they stay in the text, for the calls to be found.
        held_to: what the text is held to, if `content` is what it is to be where it calls nothing.
    """

    text: str | tuple[int, ...]
    name: str
    add_special_tokens: bool
    tool_use: ToolUse = field(default_factory=ToolUse)
    shown_special_tokens: tuple[int, ...] = ()
    held_to: Callable[[Structure | None], Structure | None] = lambda content: content


class PromptReader:
    """Reads the inputs of calls.

    Args:
        chat_template: None: the model has none, and takes no conversations.
    """

    def __init__(self, text: TextGenerator, chat_template: ChatTemplate | None) -> None:
        self._text = text
        self._chat_template = chat_template
        self._style = call_style("" if chat_template is None else chat_template.source)
        self._call_markup = markup_token_ids(text.tokenizer, self._style)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def read(self, request: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest) -> Prompt:
        """
        Raises:
            ModelNotFound: another model is asked for.
            InvalidRequest: there is no input, or none that the model could take.
        """
        if request.WhichOneof("input") == "chat":
            call_is_conversation()
        self.check_model(request)
        match request.WhichOneof("input"):
            case "tokenized":
                assert isinstance(request, generation_pb2.GenerateRequest), "only it has token ids"
                return Prompt(self._token_ids(request.tokenized), "tokenized", add_special_tokens=False)
            case "text":
                return Prompt(request.text, "text", add_special_tokens=_adds_special_tokens(request, default=True))
            case "chat":
                return self._chat(request)
        fields = ", ".join(field.name for field in request.DESCRIPTOR.oneofs_by_name["input"].fields)
        raise InvalidRequest(f"input is missing: give one of {fields}", param="input")

    def call_parser(self, tool_use: ToolUse) -> CallParser | None:
        """What finds the calls in the text of a choice; None: there are none to be found."""
        return call_parser(tool_use, self._style)

    def check_model(
        self,
        request: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest | generation_pb2.DetokenizeRequest,
    ) -> None:
        """Raises `ModelNotFound` if another than the served one is named."""
        served = self._text.model.served_model_name
        if request.HasField("model") and request.model != served:
            raise ModelNotFound(f"the model {request.model!r} does not exist; served is {served!r}", param="model")

    def _token_ids(self, tokenized: generation_pb2.TokenizedInput) -> tuple[int, ...]:
        # Before they become a tuple: a message can hold tens of millions.
        num_ids, context = len(tokenized.input_ids), self._text.model.max_model_len
        if num_ids > context:
            raise InvalidRequest(
                f"tokenized has {num_ids} ids, which cannot fit the model's context of {context} tokens",
                param="tokenized",
                code="context_length_exceeded",
            )
        return tuple(tokenized.input_ids)

    def _chat(self, request: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest) -> Prompt:
        if self._chat_template is None:
            name = self._text.model.served_model_name
            raise InvalidRequest(f"the model {name!r} has no chat template: give text or tokenized", param="chat")
        chat, variables = request.chat, None
        if chat.add_generation_prompt and chat.continue_final_message:
            raise InvalidRequest(
                "continue_final_message is not allowed together with add_generation_prompt: the model goes on with the "
                "last message, or begins one of its own",
                param="continue_final_message",
            )
        if chat.HasField("chat_template_kwargs"):
            variables = json_object(chat.chat_template_kwargs, "chat_template_kwargs")
        tool_use = parse_tool_use(
            openai_tools(chat.tools),
            openai_tool_choice(chat.tool_choice),
            chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None,
        )
        text = render_conversation(
            self._chat_template,
            parse_messages(openai_messages(chat.messages)),
            tool_use.tools,
            add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
            continue_final_message=chat.continue_final_message,
            variables=variables,
        )
        return Prompt(
            text,
            "chat",
            add_special_tokens=_adds_special_tokens(request, default=False),  # the template writes them itself
            tool_use=tool_use,
            shown_special_tokens=self._call_markup if tool_use.mode is ToolMode.AUTO else (),
            held_to=lambda content: answer_structure(tool_use, content, self._style, self._text.tokenizer),
        )


def _adds_special_tokens(
    request: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest, *, default: bool
) -> bool:
    return request.add_special_tokens if request.HasField("add_special_tokens") else default

"""How a model writes its calls: the template that it was trained with shows it."""

from collections.abc import Iterable
from enum import Enum

from engine.tokenizer.tokenizer import Tokenizer


class CallStyle(Enum):
    """The markup around a call."""

    HERMES = (
        "hermes"  # <tool_call>{"name": …, "arguments": …}</tool_call>: Hermes, Qwen, SmolLM, and whoever knows none
    )
    MISTRAL = "mistral"  # [TOOL_CALLS][{"name": …, "arguments": …}], or [TOOL_CALLS]name[ARGS]{…}
    LLAMA = "llama"  # {"name": …, "parameters": …}, sometimes after <|python_tag|>


# Any of these in a template tells its style; tried in this order.
_SIGNS = {
    "[TOOL_CALLS]": CallStyle.MISTRAL,
    "<tool_call>": CallStyle.HERMES,
    "<|python_tag|>": CallStyle.LLAMA,
    "ipython": CallStyle.LLAMA,
}
_MARKUP = {
    CallStyle.HERMES: ("<tool_call>", "</tool_call>"),
    CallStyle.MISTRAL: ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    CallStyle.LLAMA: ("<|python_tag|>",),
}


def call_style(template_source: str) -> CallStyle:
    """The style of a chat template; Hermes', where it shows none: that is what such a model is told to write."""
    return next((style for sign, style in _SIGNS.items() if sign in template_source), CallStyle.HERMES)


def markup_token_ids(tokenizer: Tokenizer, style: CallStyle) -> tuple[int, ...]:
    """The special tokens that calls are written with: they must stay in the text where others are left out of it."""
    ids: Iterable[int | None] = (tokenizer.token_id(text) for text in _MARKUP[style])
    return tuple(token_id for token_id in ids if token_id in tokenizer.special_token_ids)

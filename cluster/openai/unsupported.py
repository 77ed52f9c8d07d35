"""Fields that ask for something that cannot be done here: refused by name, with the reason.

Other fields that are not in a request's model cannot change the reply, and are passed over.
"""

from collections.abc import Mapping
from typing import Any

from cluster.errors import InvalidRequest

UNSUPPORTED = {
    "use_beam_search": "sequences are sampled",
    "allowed_token_ids": "use logit_bias, guided_choice or guided_regex",
    "bad_words": "use logit_bias",
    "truncate_prompt_tokens": "a prompt is taken whole or not at all",
    "logits_processors": "programs are not taken from requests",
    "prompt_embeds": "a prompt is text or token ids",
    "audio": "this model writes text",
}
UNSUPPORTED_IN_COMPLETIONS = UNSUPPORTED | {"suffix": "this model cannot fill in"}
UNSUPPORTED_IN_CHAT = UNSUPPORTED | {
    "functions": "it is the old form of tools; use tools",
    "function_call": "it is the old form of tool_choice; use tool_choice",
    "web_search_options": "nothing is looked up",
    "moderation": "texts are not judged",
    "chat_template": "the model's own template is used",
    "echo": "use continue_final_message to go on from a message",
}


def refuse_unsupported(body: Mapping[str, Any], unsupported: Mapping[str, str]) -> None:
    """Raises `InvalidRequest` if `body` has one of the fields, and not with a value that asks for nothing."""
    for name, reason in unsupported.items():
        if body.get(name):
            raise InvalidRequest(f"{name} is not supported: {reason}", param=name, code="unsupported_parameter")

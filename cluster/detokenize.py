"""What token ids say, for both front doors."""

import asyncio
from collections.abc import Sequence

from cluster.errors import InvalidRequest
from cluster.text_generator import TextGenerator


async def detokenize(text: TextGenerator, token_ids: Sequence[int]) -> str:
    """The text of token ids, special ones included; bytes that are no UTF-8 become U+FFFD.

    Args:
        token_ids: the field `tokens` of a request.

    Raises:
        InvalidRequest: the model has no such token, or no context for so many.
    """
    context, vocab_size = text.model.max_model_len, text.model.vocab_size
    # Before anything looks at them: a message can hold millions.
    if len(token_ids) > context:
        raise InvalidRequest(f"tokens has {len(token_ids)} ids; the model's context holds {context}", param="tokens")
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"tokens has the id {token_id}; the model's ids are 0 to {vocab_size - 1}", param="tokens"
            )
    # In a thread: a full context takes milliseconds, for which other calls' tokens would have to wait.
    return await asyncio.to_thread(text.tokenizer.decode, token_ids, skip_special_tokens=False)

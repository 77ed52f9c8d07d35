"""Which tokens a request's structure leaves it for one row, as the words of a bit mask."""

import numpy as np
import numpy.typing as npt

from engine.executor import SamplingInput

Words = npt.NDArray[np.uint32]  # [ceil(vocab_size / 32)]: bit i % 32 of word i // 32 is token i's
Flags = npt.NDArray[np.bool_]

_ALONE = np.uint32(1) << np.arange(32, dtype=np.uint32)


def allowed_tokens(sampling: SamplingInput) -> Words | None:
    """None: all. Asked once for each row: a matcher has to look."""
    return None if sampling.matcher is None else sampling.matcher.allowed(sampling.output_token_ids)


def flags(allowed: Words, vocab_size: int) -> Flags:
    """[vocab_size], whether each token is in `allowed`."""
    return np.unpackbits(allowed.astype("<u4", copy=False).view(np.uint8), count=vocab_size, bitorder="little").view(
        np.bool_
    )


def smallest(allowed: Words) -> int:
    """The smallest id in it."""
    word = int(np.flatnonzero(allowed)[0])
    bits = int(allowed[word])
    return 32 * word + (bits & -bits).bit_length() - 1


def masked_stop_tokens(sampling: SamplingInput, allowed: Words | None, vocab_size: int) -> npt.NDArray[np.int64]:
    """The stop tokens that `min_tokens` makes impossible; none where the structure leaves nothing else.

    Ids outside the vocabulary cannot be sampled anyway.
    """
    params = sampling.params
    if len(sampling.output_token_ids) >= params.min_tokens or not params.stop_token_ids:
        return np.empty(0, np.int64)
    stop = np.fromiter(params.stop_token_ids, np.int64, len(params.stop_token_ids))
    stop = stop[(stop >= 0) & (stop < vocab_size)]
    if allowed is not None:
        rest = allowed.copy()
        np.bitwise_and.at(rest, stop // 32, ~_ALONE[stop % 32])
        if not rest.any():
            return stop[:0]
    return stop

"""An executor without a model: what a KV slot holds is its token, the next token is a hash of all that is read.

It computes nothing, but depends on everything that serving must get right: a wrong block table, a stale or missing
block, a slot written to the wrong place or copied too early changes the text from there on. And it lives in the pool's
memory, so blocks that move between workers carry it. The expected text of a request needs no pool at all:
`expected_tokens`; and so do log-probabilities of its prompt: `expected_prompt_logprobs`.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.executor import (
    ModelOutput,
    SampledToken,
    SamplingInput,
    ScheduledRequest,
    SchedulerOutput,
    TokenMatcher,
)
from engine.memory import HostMemory, KVLayout, PoolMemory
from engine.sampling_params import SamplingParams, finish_reason_after

SLOT_SIZE = 8  # bytes: position + 1 in the upper half, token id in the lower; an unwritten slot is 0

_Slots = npt.NDArray[np.int64]


class HashExecutor:
    """See the module's docstring.

    Args:
        fingerprint: 16 bytes; executors of equal fingerprints understand each other's blocks.
    """

    def __init__(
        self, *, vocab_size: int = 1000, block_size: int = 16, fingerprint: bytes = b"hash-executor-v1"
    ) -> None:
        self._vocab_size = vocab_size
        self._layout = KVLayout(block_size, block_size * SLOT_SIZE, fingerprint)
        self._pool: _Slots | None = None  # [num_blocks, block_size]

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def layout(self) -> KVLayout:
        return self._layout

    def bind(self, memory: PoolMemory, num_blocks: int) -> None:
        """Uses `memory` as the pool."""
        assert isinstance(memory, HostMemory), memory
        num_slots = num_blocks * self._layout.block_size
        slots = np.frombuffer(memory.buffer, dtype="<i8", count=num_slots)
        self._pool = slots.reshape(num_blocks, self._layout.block_size)

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Copies, writes all tokens of the step, then samples: like in a model's layer, it writes before it reads."""
        pool = self._pool
        assert pool is not None, "execute before bind"
        for source, target in step.block_copies:
            pool[target] = pool[source]
        for request in step.requests:
            self._write(pool, request)
        return ModelOutput(
            {
                request_id: self._sample(pool, request, sampling)
                for request in step.requests
                for request_id, sampling in request.samplings
            },
            prompt_logprobs={
                request.request_id: self._prompt_logprobs(pool, request)
                for request in step.requests
                if request.prompt_targets
            },
        )

    def _write(self, pool: _Slots, request: ScheduledRequest) -> None:
        positions = np.arange(request.num_computed_tokens, request.num_computed_tokens + len(request.token_ids))
        slots = _slots(np.asarray(request.token_ids, dtype=np.int64), positions)
        block_size = self._layout.block_size
        for table in request.block_tables:
            pool[np.asarray(table)[positions // block_size], positions % block_size] = slots

    def _sample(self, pool: _Slots, request: ScheduledRequest, sampling: SamplingInput) -> SampledToken:
        read = self._read(pool, request, request.num_computed_tokens + len(request.token_ids))
        allowed = None if sampling.matcher is None else sampling.matcher.allowed(sampling.output_token_ids)
        return _next_token(read, sampling.params, self._vocab_size, allowed)

    def _prompt_logprobs(self, pool: _Slots, request: ScheduledRequest) -> list[SampledToken]:
        first, targets = request.num_computed_tokens, request.prompt_targets
        read = self._read(pool, request, first + len(targets))
        return _prompt_logprobs(read, first, targets, request.num_prompt_top, self._vocab_size)

    def _read(self, pool: _Slots, request: ScheduledRequest, num_tokens: int) -> list[_Slots]:
        num_blocks = -(-num_tokens // self._layout.block_size)
        return [pool[np.asarray(table[:num_blocks])].reshape(-1)[:num_tokens] for table in request.block_tables]


def next_token(
    token_ids: Sequence[int],
    params: SamplingParams,
    vocab_size: int,
    *,
    num_groups: int = 1,
    allowed: npt.NDArray[np.uint32] | None = None,
) -> SampledToken:
    """What a `HashExecutor` samples after these tokens, if all went well: the oracle, without any pool.

    Args:
        allowed: by the request's matcher.
    """
    slots = _slots(np.asarray(token_ids, dtype=np.int64), np.arange(len(token_ids)))
    return _next_token([slots] * num_groups, params, vocab_size, allowed)


def expected_tokens(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    vocab_size: int,
    *,
    max_model_len: int = 2**31,
    matcher: TokenMatcher | None = None,
) -> list[int]:
    """The whole output of a request on a `HashExecutor`, if all goes well."""
    output: list[int] = []
    while True:
        allowed = None if matcher is None else matcher.allowed(output)
        output.append(next_token([*prompt_token_ids, *output], params, vocab_size, allowed=allowed).token_id)
        num_tokens = len(prompt_token_ids) + len(output)
        if finish_reason_after(params, output[-1], len(output), num_tokens, max_model_len) is not None:
            return output


def expected_prompt_logprobs(
    prompt_token_ids: Sequence[int], params: SamplingParams, vocab_size: int
) -> tuple[SampledToken, ...] | None:
    """What comes with the first token of a request on a `HashExecutor`, if all goes well."""
    if params.prompt_logprobs is None:
        return None
    slots = _slots(np.asarray(prompt_token_ids, dtype=np.int64), np.arange(len(prompt_token_ids)))
    return tuple(_prompt_logprobs([slots[:-1]], 0, prompt_token_ids[1:], params.prompt_logprobs, vocab_size))


def _slots(token_ids: _Slots, positions: _Slots) -> _Slots:
    return ((positions + 1) << 32) | token_ids


def _next_token(
    read: Sequence[_Slots], params: SamplingParams, vocab_size: int, allowed: npt.NDArray[np.uint32] | None
) -> SampledToken:
    hasher = hashlib.blake2b(digest_size=16)
    for slots in read:
        hasher.update(np.ascontiguousarray(slots, dtype="<i8").data)
    if not params.is_greedy:
        hasher.update(params.seed.to_bytes(8, "little", signed=True))
    digest = hasher.digest()
    number = int.from_bytes(digest[:8], "little")
    if allowed is None:
        token_id = number % vocab_size
    else:
        bits = np.unpackbits(allowed.astype("<u4").view(np.uint8), bitorder="little", count=vocab_size)
        ids = np.flatnonzero(bits)
        token_id = int(ids[number % len(ids)])
    if params.logprobs is None:
        return SampledToken(token_id)
    return _with_logprobs(digest, token_id, params.logprobs, vocab_size)


def _prompt_logprobs(
    read: Sequence[_Slots], first: int, targets: Sequence[int], num_top: int, vocab_size: int
) -> list[SampledToken]:
    """Of the tokens behind those at `first` and on: a hash of all that is read up to there decides.

    Args:
        read: of each group, first + len(targets) slots.
    """
    slots = np.ascontiguousarray(np.stack(read, axis=1), dtype="<i8")
    hasher = hashlib.blake2b(slots[:first].tobytes(), digest_size=16)
    found = []
    for row, target in zip(slots[first:], targets, strict=True):
        hasher.update(row.data)
        found.append(_with_logprobs(hasher.digest(), target, num_top, vocab_size))
    return found


def _with_logprobs(digest: bytes, token_id: int, num_top: int, vocab_size: int) -> SampledToken:
    """Any numbers will do that are a function of the same and ordered as logprobs are."""
    best_id, best = int.from_bytes(digest[:8], "little") % vocab_size, -(1 + digest[8]) / 256
    top = tuple(((best_id + rank) % vocab_size, best - rank) for rank in range(min(num_top, vocab_size)))
    return SampledToken(token_id, best - (token_id - best_id) % vocab_size, top)

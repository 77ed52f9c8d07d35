"""An executor without a model: what a KV slot holds is its token, the next token is a hash of all that is read.

It computes nothing, but depends on everything that serving must get right: a wrong block table, a stale or missing
block, a slot written to the wrong place or copied too early changes the text from there on. And it lives in the pool's
memory, so blocks that move between workers carry it. The expected text of a request needs no pool at all:
`expected_tokens`.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.executor import ModelOutput, SampledToken, SamplingInput, ScheduledRequest, SchedulerOutput
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
        """Writes all tokens of the step, then samples: like in a model's layer, the batch writes before it reads."""
        assert self._pool is not None, "execute before bind"
        for request in step.requests:
            self._write(self._pool, request)
        return ModelOutput(
            {
                request.request_id: self._sample(self._pool, request, request.sampling)
                for request in step.requests
                if request.sampling is not None
            }
        )

    def _write(self, pool: _Slots, request: ScheduledRequest) -> None:
        positions = np.arange(request.num_computed_tokens, request.num_computed_tokens + len(request.token_ids))
        slots = _slots(np.asarray(request.token_ids, dtype=np.int64), positions)
        block_size = self._layout.block_size
        for table in request.block_tables:
            pool[np.asarray(table)[positions // block_size], positions % block_size] = slots

    def _sample(self, pool: _Slots, request: ScheduledRequest, sampling: SamplingInput) -> SampledToken:
        num_tokens = request.num_computed_tokens + len(request.token_ids)
        num_blocks = -(-num_tokens // self._layout.block_size)
        read = [pool[np.asarray(table[:num_blocks])].reshape(-1)[:num_tokens] for table in request.block_tables]
        return _next_token(read, sampling.params, self._vocab_size)


def next_token(
    token_ids: Sequence[int], params: SamplingParams, vocab_size: int, *, num_groups: int = 1
) -> SampledToken:
    """What a `HashExecutor` samples after these tokens, if all went well: the oracle, without any pool."""
    slots = _slots(np.asarray(token_ids, dtype=np.int64), np.arange(len(token_ids)))
    return _next_token([slots] * num_groups, params, vocab_size)


def expected_tokens(
    prompt_token_ids: Sequence[int], params: SamplingParams, vocab_size: int, *, max_model_len: int = 2**31
) -> list[int]:
    """The whole output of a request on a `HashExecutor`, if all goes well."""
    token_ids = list(prompt_token_ids)
    while True:
        token_ids.append(next_token(token_ids, params, vocab_size).token_id)
        num_output_tokens = len(token_ids) - len(prompt_token_ids)
        if finish_reason_after(params, token_ids[-1], num_output_tokens, len(token_ids), max_model_len) is not None:
            return token_ids[len(prompt_token_ids) :]


def _slots(token_ids: _Slots, positions: _Slots) -> _Slots:
    return ((positions + 1) << 32) | token_ids


def _next_token(read: Sequence[_Slots], params: SamplingParams, vocab_size: int) -> SampledToken:
    hasher = hashlib.blake2b(digest_size=16)
    for slots in read:
        hasher.update(np.ascontiguousarray(slots, dtype="<i8").data)
    if not params.is_greedy:
        hasher.update(params.seed.to_bytes(8, "little", signed=True))
    digest = hasher.digest()
    token_id = int.from_bytes(digest[:8], "little") % vocab_size
    if params.logprobs is None:
        return SampledToken(token_id)
    # Any numbers will do that are a function of the same and ordered as logprobs are.
    best = -(1 + digest[8]) / 256
    top = tuple(((token_id + rank) % vocab_size, best - rank) for rank in range(min(params.logprobs, vocab_size)))
    return SampledToken(token_id, best, top)

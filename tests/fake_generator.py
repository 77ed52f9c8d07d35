"""A generator without workers: its next token is a hash of all tokens so far, as from a model that never changes.

`script` makes it say given tokens instead; `gate` lets a test hold it before each chunk; `closed` lists the requests
whose iteration has ended, however it did.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager

from cluster.errors import GenerationError, QueueFull
from cluster.generator import GeneratorStats, SequenceChunk, SequenceRequest, ServedModel, check_choices
from cluster.worker_info import Role, WorkerInfo, WorkerLoad, WorkerStatus
from engine.executor import SampledToken
from engine.sampling_params import FinishReason, finish_reason_after

Script = Callable[[SequenceRequest], Sequence[int]]


def served_model(vocab_size: int = 49152, max_model_len: int = 8192, name: str = "fake") -> ServedModel:
    return ServedModel(
        served_model_name=name,
        model_path="fake.gguf",
        fingerprint=b"0123456789abcdef",
        block_size=16,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        dtype="float32",
    )


def worker_status(worker_id: str = "decode-0", role: Role = Role.DECODE, *, ready: bool = True) -> WorkerStatus:
    info = WorkerInfo(
        worker_id=worker_id,
        instance_id=f"{worker_id}-1",
        role=role,
        address="127.0.0.1:1",
        model_name="fake",
        model_path="fake.gguf",
        fingerprint=b"0123456789abcdef",
        block_size=16,
        num_blocks=100,
        max_model_len=8192,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        vocab_size=49152,
        bytes_per_block=1024,
        dtype="float32",
        metrics_address="",
    )
    return WorkerStatus(
        address=info.address,
        ready=ready,
        info=info,
        load=WorkerLoad(num_running=1, num_free_blocks=90, num_cached_blocks=5, num_active_blocks=4),
        kv_events_silent=False,
        num_directory_blocks=5,
        last_error=None,
    )


class FakeGenerator:
    """Implements `cluster.generator.Generator`.

    Args:
        script: the tokens of a request; the last one is repeated.
        fail: raised by a request after `fail_after` chunks.
        tokens_per_chunk: how many tokens a step brings.
    """

    def __init__(
        self,
        model: ServedModel | None = None,
        *,
        script: Script | None = None,
        fail: GenerationError | Exception | None = None,
        fail_after: int = 0,
        tokens_per_chunk: int = 1,
        num_cached_tokens: int = 0,
        max_concurrent: int = 1024,
    ) -> None:
        self.model = model or served_model()
        self.stats = GeneratorStats()
        self.max_concurrent = max_concurrent
        self.requests: list[SequenceRequest] = []
        self.closed: list[str] = []
        self.finished: list[str] = []
        self.gate: asyncio.Semaphore | None = None
        self.statuses = [worker_status("prefill-0", Role.PREFILL), worker_status("decode-0", Role.DECODE)]
        self._script = script
        self._fail = fail
        self._fail_after = fail_after
        self._tokens_per_chunk = tokens_per_chunk
        self._num_cached_tokens = num_cached_tokens
        self._started = asyncio.Event()
        self._ended = asyncio.Event()

    async def wait_ready(self) -> None:
        return

    def workers(self) -> Sequence[WorkerStatus]:
        return self.statuses

    async def started(self) -> None:
        """Until a request has been taken."""
        await self._started.wait()

    async def ended(self) -> None:
        """Until a request has ended."""
        await self._ended.wait()

    @contextmanager
    def admit(self, requests: Sequence[SequenceRequest]) -> Iterator[None]:
        if self.stats.num_active + len(requests) > self.max_concurrent:
            raise QueueFull(f"{self.stats.num_active} requests are in flight")
        yield

    def generate_choices(self, requests: Sequence[SequenceRequest]) -> list[AsyncGenerator[SequenceChunk, None]]:
        if len(requests) > 1:
            check_choices(requests)
        return [self.generate(request) for request in requests]

    async def generate(self, request: SequenceRequest) -> AsyncGenerator[SequenceChunk, None]:
        self.requests.append(request)
        self._started.set()
        self.stats.num_active += 1
        try:
            output: list[int] = []
            num_chunks = 0
            while True:
                if self.gate is not None:
                    await self.gate.acquire()
                else:
                    await asyncio.sleep(0)
                if self._fail is not None and num_chunks == self._fail_after:
                    raise self._fail
                chunk = self._step(request, output)
                num_chunks += 1
                if chunk.finish_reason is not None:
                    self.finished.append(request.request_id)
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self.stats.num_active -= 1
            self.closed.append(request.request_id)
            self._ended.set()

    def _step(self, request: SequenceRequest, output: list[int]) -> SequenceChunk:
        tokens: list[SampledToken] = []
        reason: FinishReason | None = None
        while reason is None and len(tokens) < self._tokens_per_chunk:
            token = self._next(request, output)
            tokens.append(token)
            output.append(token.token_id)
            reason = finish_reason_after(
                request.params,
                token.token_id,
                len(output),
                len(request.prompt_token_ids) + len(output),
                self.model.max_model_len,
            )
        return SequenceChunk(
            tokens=tuple(tokens),
            finish_reason=reason,
            matched_token_id=output[-1] if reason is FinishReason.STOP else None,
            num_cached_tokens=self._num_cached_tokens,
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            prompt_logprobs=self._prompt_logprobs(request) if len(output) == len(tokens) else None,
        )

    def _prompt_logprobs(self, request: SequenceRequest) -> tuple[SampledToken, ...] | None:
        """Any numbers that tell the places in the prompt apart."""
        num_top = request.params.prompt_logprobs
        if num_top is None:
            return None
        return tuple(
            SampledToken(
                token_id,
                -0.5 - position / 64,
                tuple(((token_id + rank) % self.model.vocab_size, -0.25 - rank) for rank in range(num_top)),
            )
            for position, token_id in enumerate(request.prompt_token_ids[1:], 1)
        )

    def _next(self, request: SequenceRequest, output: Sequence[int]) -> SampledToken:
        params = request.params
        if self._script is not None:
            script = self._script(request)
            token_id = script[min(len(output), len(script) - 1)]
        else:
            seed = 0 if params.is_greedy else params.seed
            state = repr((request.prompt_token_ids, tuple(output), seed)).encode()
            digest = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")
            # Away from the special tokens, so that text goes on.
            token_id = 300 + digest % (min(self.model.vocab_size, 5000) - 300)
        if params.logprobs is None:
            return SampledToken(token_id)
        others = [(token_id + step) % self.model.vocab_size for step in range(1, params.logprobs + 1)]
        best = [(token_id, -0.25), *((other, -1.5 - step) for step, other in enumerate(others))]
        return SampledToken(token_id, -0.25, tuple(best[: params.logprobs]))

"""The executor that runs the real model.

A step of its life: blocks that are to be copied are; the scheduler's requests become one flat batch (token ids, and the
attention metadata that all layers share); the layers fill the pool and yield logits for the requests that sample; the
sampler answers a token each, or one for each fork of a prompt. Nothing of a request stays behind in here: the next step
may be somebody else's.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol, get_args

import numpy as np
import torch

from engine.attention import default_backend, get_backend
from engine.attention.backend import AttentionMetadata, AttentionShape, build_metadata
from engine.config import Dtype, KVCacheDtype, check_device, resolved_dtype
from engine.cuda.device_copy import DeviceCopy
from engine.cuda.graphs import DecodeGraphs
from engine.executor import ModelOutput, SampledToken, SamplingInput, ScheduledRequest, SchedulerOutput
from engine.huge_pages import collapse_into_huge_pages
from engine.memory import DeviceMemory, HostMemory, KVLayout, PoolMemory
from engine.model.config import ModelConfig
from engine.model.fingerprint import fingerprint, weights_identity
from engine.model.linear import TiledLinear
from engine.model.llama import Llama
from engine.model.tensor_source import weight_files
from engine.model.weights import load_llama
from engine.sampling.prompt_logprobs import prompt_logprobs
from engine.sampling.sampler import Sampler

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchExecutor:
    """Runs a model of the Llama family. Used by one thread at a time.

    Args:
        model_path: a folder or a GGUF file, as `resolve_model` returns it.
        dtype: of weights and activations, and of KV blocks unless `kv_cache_dtype` says otherwise. "auto": see
            `engine.config.resolved_dtype`.
        device: "cpu", or a GPU as torch names it ("cuda", "cuda:1").
        attention_backend: a name in `engine.attention.BACKENDS`; "auto": the best that can run here.
        num_threads: that compute; None: as many as torch has chosen. For the whole process.
        max_graph_batch: decode steps of up to so many requests are captured as CUDA graphs; 0: none.
        max_model_len: no request is longer; None: the model's context.

    Raises:
        ModelLoadError: the model's files are missing, damaged or not supported.
        ValueError: an argument is not one of its values, or what it asks for cannot be had here.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        dtype: Dtype = "auto",
        block_size: int = 16,
        device: str = "cpu",
        kv_cache_dtype: KVCacheDtype = "auto",
        attention_backend: str = "auto",
        num_threads: int | None = None,
        max_graph_batch: int = 0,
        max_model_len: int | None = None,
    ) -> None:
        if dtype not in get_args(Dtype):
            raise ValueError(f"dtype must be one of {', '.join(get_args(Dtype))}, not {dtype!r}")
        if kv_cache_dtype not in get_args(KVCacheDtype):
            allowed = ", ".join(get_args(KVCacheDtype))
            raise ValueError(f"kv_cache_dtype must be one of {allowed}, not {kv_cache_dtype!r}")
        if block_size < 1:
            raise ValueError(f"block_size must be above 0, not {block_size}")
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads must be above 0, not {num_threads}")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._device = _checked_device(device)
        on_gpu = self._device.type == "cuda"
        self._dtype = _DTYPES[resolved_dtype(dtype, device)]
        self._kv_dtype = torch.float8_e4m3fn if kv_cache_dtype == "fp8_e4m3" else self._dtype
        self.config = ModelConfig.load(model_path)
        if attention_backend == "auto":
            attention_backend = default_backend(self._device.type, self.dtype, self.config.head_dim)
        self._attention = get_backend(
            attention_backend, num_threads=num_threads or torch.get_num_threads(), device=str(self._device)
        )
        self._shape = AttentionShape(
            num_heads=self.config.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            block_size=block_size,
            dtype=self._dtype,
            kv_dtype=self._kv_dtype,
            scale=self.config.head_dim**-0.5,
            windows=frozenset(self.config.layer_windows),
            max_context_len=max_model_len or self.config.max_position_embeddings,
        )
        with _current(self._device):
            self._attention.prepare(self._shape)  # refuses what it cannot serve before the weights are read
        self._model = load_llama(
            model_path, self.config, self._dtype, self._device, with_kv_scales=self._kv_dtype != self._dtype
        )
        if not on_gpu:
            collapse_into_huge_pages()
        tiled = all(isinstance(linear, TiledLinear) for linear in self._model.linears)
        if tiled and not self._attention.needs_torch_threads:
            # What takes time has threads of its own; torch's would spin on the cores that those compute on.
            torch.set_num_threads(1)
        self._sampler = _make_sampler(self._device)
        self._layout = KVLayout(
            block_size=block_size,
            bytes_per_block=self.config.bytes_per_block(block_size, self._kv_dtype.itemsize),
            fingerprint=fingerprint(
                self.config,
                dtype=self.dtype,
                kv_dtype=_name(self._kv_dtype),
                kv_scales=[layer.kv_scales for layer in self._model.layers],
                block_size=block_size,
                weights=weights_identity(weight_files(model_path)),
            ),
        )
        self._max_graph_batch = max_graph_batch if on_gpu and self._attention.can_replay else 0
        self._graphs: DecodeGraphs | None = None
        self._blocks = torch.empty(0, 0, dtype=torch.uint8)  # [num_blocks, bytes_per_block], the pool
        self._layer_kvs: list[torch.Tensor] = []
        self._memory: PoolMemory | None = None

    @property
    def dtype(self) -> str:
        """Of weights and activations: "float32" or "bfloat16"."""
        return _name(self._dtype)

    @property
    def model(self) -> Llama:
        """The weights and what is computed with them."""
        return self._model

    @property
    def item_bytes(self) -> int:
        """Of a number of weights and activations."""
        return self._dtype.itemsize

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def layout(self) -> KVLayout:
        return self._layout

    def bind(self, memory: PoolMemory, num_blocks: int) -> None:
        """Uses `memory` as the pool, not copied; captures graphs, if there are to be any."""
        num_bytes = num_blocks * self._layout.bytes_per_block
        self._blocks = _as_bytes(memory, self._device)[:num_bytes].view(num_blocks, self._layout.bytes_per_block)
        shape = self._shape
        pool = self._blocks.view(-1).view(self._kv_dtype)
        pool = pool.view(num_blocks, self.config.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self._layer_kvs = list(pool.unbind(dim=1))
        self._memory = memory
        if self._max_graph_batch > 0:
            with torch.inference_mode(), _current(self._device):
                self._graphs = DecodeGraphs(
                    self._forward,
                    self._attention,
                    vocab_size=self.vocab_size,
                    max_batch=self._max_graph_batch,
                    device=self._device,
                )

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Computes the step: copies blocks, fills the KV slots of its tokens and samples where asked."""
        assert self._layer_kvs, "execute before bind"
        with _current(self._device):
            for source, target in step.block_copies:
                self._blocks[target].copy_(self._blocks[source])  # on the stream that computes, so before it
            return self._compute(step) if step.requests else ModelOutput()

    def _compute(self, step: SchedulerOutput) -> ModelOutput:
        requests = step.requests
        token_ids = np.fromiter((t for r in requests for t in r.token_ids), np.int64, step.num_tokens)
        low, high = int(token_ids.min()), int(token_ids.max())
        assert 0 <= low <= high < self.vocab_size, f"token ids {low} … {high}, vocabulary {self.vocab_size}"
        metadata = build_metadata(requests, block_size=self._layout.block_size)

        # A request's next token follows from its last row, and so do those of all its forks.
        samplings = [r.samplings for r in requests]
        counts = np.fromiter(map(len, samplings), np.int64, len(requests))
        rows = (metadata.query_start[1:] - 1)[counts > 0].astype(np.int64)
        row_of_sampling = np.repeat(np.arange(len(rows)), counts[counts > 0])
        # One copy up, that waits for nothing: a step that samples nothing leaves the device at work.
        copy = DeviceCopy()
        places = [copy.add_ints(array) for array in (token_ids, metadata.positions, rows, row_of_sampling)]
        copy.send(self._device)
        tokens, positions, logit_rows, repeats = (copy[place] for place in places)

        logits, prompt_logprobs = self._logits(tokens, positions, metadata, requests, logit_rows)
        if len(row_of_sampling) == 0:
            return ModelOutput(fence=self._record_fence(), prompt_logprobs=prompt_logprobs)
        if len(row_of_sampling) > len(rows):
            logits = logits[repeats]
        sampled = self._sampler.sample(logits, [sampling for _, sampling in chain(*samplings)])
        # The tokens are here, so the step's work is done.
        return ModelOutput(
            {request_id: token for (request_id, _), token in zip(chain(*samplings), sampled, strict=True)},
            prompt_logprobs=prompt_logprobs,
        )

    def _logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        requests: Sequence[ScheduledRequest],
        rows: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, list[SampledToken]]]:
        """[len(rows), vocab_size] float32, and the log-probabilities of prompts that are asked for."""
        asking = [(int(first), r) for first, r in zip(metadata.query_start, requests, strict=False) if r.prompt_targets]
        if self._graphs is not None and not asking and self._graphs.takes(metadata):
            logits = self._graphs.run(token_ids, positions, metadata)
            return logits if len(rows) == metadata.num_requests else logits[rows], {}
        self._attention.plan(metadata)
        residual = self._model.residual(token_ids, positions, self._attention, self._layer_kvs)
        make_logits = partial(self._model.logits, residual)
        prompt_logprobs_of = {
            r.request_id: prompt_logprobs(make_logits, first, r.prompt_targets, r.num_prompt_top, self._device)
            for first, r in asking
        }
        return make_logits(rows), prompt_logprobs_of

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        return self._model.forward(token_ids, positions, self._attention, self._layer_kvs, logit_rows)

    def _record_fence(self) -> int | None:
        if not isinstance(self._memory, DeviceMemory):
            return None
        return self._memory.record_fence(torch.cuda.current_stream(self._device).cuda_stream)


def _checked_device(name: str) -> torch.device:
    check_device(name)
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()  # 0 without a driver, or in a build for CPUs
    if (device.index or 0) >= count:
        raise ValueError(f"device {name} is not there: torch sees {count} GPUs (`tandem doctor` says why)")
    return torch.device("cuda", device.index or 0)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels of other libraries go to the thread's current device, whatever their tensors' is."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def _as_bytes(memory: PoolMemory, device: torch.device) -> torch.Tensor:
    """[nbytes] uint8, the memory itself."""
    if isinstance(memory, HostMemory):
        assert device.type == "cpu", f"a pool in host memory for {device}"
        return torch.frombuffer(memory.buffer, dtype=torch.uint8)
    assert isinstance(memory, DeviceMemory), memory
    return torch.as_tensor(memory, device=device)


class _Sampler(Protocol):
    def sample(self, logits: torch.Tensor, inputs: Sequence[SamplingInput]) -> list[SampledToken]: ...


def _make_sampler(device: torch.device) -> _Sampler:
    if device.type == "cpu":
        return Sampler()
    from engine.sampling.device_sampler import DeviceSampler

    return DeviceSampler()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

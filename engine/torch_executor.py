"""The executor that runs the real model.

A step of its life: the scheduler's requests become one flat batch (token ids, and the attention metadata that all
layers share); the layers fill the pool and yield logits for the requests that sample; the sampler answers a token each.
Nothing of a request stays behind in here: the next step may be somebody else's.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from engine.attention import get_backend
from engine.attention.backend import build_metadata
from engine.executor import ModelOutput, SchedulerOutput
from engine.memory import KVLayout, PoolMemory
from engine.model.config import ModelConfig
from engine.model.fingerprint import fingerprint, weights_identity
from engine.model.tensor_source import weight_files
from engine.model.weights import load_llama
from engine.sampling.sampler import Sampler

DtypeName = Literal["auto", "float32", "bfloat16"]
# On a CPU, "auto" is float32, whatever the weights are stored in: the same tokens everywhere come before speed.
_DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchExecutor:
    """Runs a model of the Llama family on the CPU. Used by one thread at a time.

    Args:
        model_path: a folder or a GGUF file, as `resolve_model` returns it.
        dtype: of weights, activations and KV blocks.
        attention_backend: a name in `engine.attention.BACKENDS`.
        num_threads: for the whole process; None leaves what torch has chosen.

    Raises:
        ModelLoadError: the model's files are missing, damaged or not supported.
        ValueError: an argument is not one of its values.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        dtype: DtypeName = "auto",
        block_size: int = 16,
        attention_backend: str = "cpu",
        num_threads: int | None = None,
    ) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}")
        if block_size < 1:
            raise ValueError(f"block_size must be above 0, not {block_size}")
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads must be above 0, not {num_threads}")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._dtype = _DTYPES[dtype]
        self._attention = get_backend(attention_backend, num_threads=num_threads or torch.get_num_threads())
        self.config = ModelConfig.load(model_path)
        self._model = load_llama(model_path, self.config, self._dtype)
        self._sampler = Sampler()
        self._block_shape = (  # of one block in the pool
            self.config.num_layers,
            2,
            self.config.num_kv_heads,
            block_size,
            self.config.head_dim,
        )
        self._layout = KVLayout(
            block_size=block_size,
            bytes_per_block=self.config.bytes_per_block(block_size, self._dtype.itemsize),
            fingerprint=fingerprint(
                self.config,
                dtype=str(self._dtype),
                block_size=block_size,
                weights=weights_identity(weight_files(model_path)),
            ),
        )
        self._layer_kvs: list[torch.Tensor] = []

    @property
    def dtype(self) -> str:
        """Of weights, activations and KV blocks: "float32" or "bfloat16"."""
        return str(self._dtype).removeprefix("torch.")

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def layout(self) -> KVLayout:
        return self._layout

    def bind(self, memory: PoolMemory, num_blocks: int) -> None:
        """Uses `memory` as the pool, not copied; compiles what attention needs."""
        num_items = num_blocks * self._layout.bytes_per_block // self._dtype.itemsize
        pool = torch.frombuffer(memory.buffer, dtype=self._dtype, count=num_items).view(num_blocks, *self._block_shape)
        self._layer_kvs = list(pool.unbind(dim=1))
        for window in set(self.config.layer_windows):
            self._attention.warm_up(
                dtype=self._dtype,
                num_heads=self.config.num_heads,
                num_kv_heads=self.config.num_kv_heads,
                head_dim=self.config.head_dim,
                block_size=self._layout.block_size,
                window=window,
            )

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Computes the step: fills the KV slots of its tokens and samples where asked."""
        assert self._layer_kvs, "execute before bind"
        requests = step.requests
        if not requests:
            return ModelOutput()
        token_ids = np.fromiter((t for r in requests for t in r.token_ids), np.int64, step.num_tokens)
        low, high = int(token_ids.min()), int(token_ids.max())
        assert 0 <= low <= high < self.vocab_size, f"token ids {low} … {high}, vocabulary {self.vocab_size}"
        metadata = build_metadata(requests, block_size=self._layout.block_size)

        # A request's next token follows from its last row.
        sampling = [
            (row, r) for row, r in zip(metadata.query_start[1:] - 1, requests, strict=True) if r.sampling is not None
        ]
        logits = self._model.forward(
            torch.from_numpy(token_ids),
            metadata,
            self._attention,
            self._layer_kvs,
            torch.tensor([int(row) for row, _ in sampling], dtype=torch.int64),
        )
        if not sampling:
            return ModelOutput()
        tokens = self._sampler.sample(logits, [r.sampling for _, r in sampling if r.sampling is not None])
        return ModelOutput({r.request_id: token for (_, r), token in zip(sampling, tokens, strict=True)})

"""How one worker's engine is dimensioned."""

import re
from dataclasses import dataclass
from typing import Literal

from engine.cpu_features import multiplies_bfloat16
from engine.kvcache.slots import num_blocks_for

Dtype = Literal["auto", "float32", "bfloat16"]
KVCacheDtype = Literal["auto", "fp8_e4m3"]


def resolved_dtype(dtype: Dtype, device: str) -> Literal["float32", "bfloat16"]:
    """What "auto" is on a device ("cpu", "cuda", "cuda:1"): whoever plans a pool and who fills it must agree.

    It is bfloat16, whatever the weights are stored in, except on a CPU that cannot multiply it: float32 there.
    """
    if dtype == "auto":
        return "float32" if device == "cpu" and not multiplies_bfloat16() else "bfloat16"
    return dtype


def check_device(name: str) -> None:
    """
    Raises:
        ValueError: not the name of a device: "cpu", "cuda", "cuda:1".
    """
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise ValueError(f"device must be cpu, cuda or cuda:<number>, not {name!r}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Complete at birth; what is found out at run time (the number of blocks that fit) is put in by who found it out.

    Raises:
        ValueError: a value out of its range, or two that contradict each other; the message has both.
    """

    num_blocks: int  # with the null block
    max_model_len: int  # tokens of one sequence, prompt and output
    block_size: int = 16  # tokens
    max_num_seqs: int = 64  # running and receiving
    max_num_batched_tokens: int = 512  # one step's budget: decodes first, prefill chunks with the rest
    # What admission expects a request to generate, if it may generate so much: enough that a request does not crowd
    # out others as soon as it decodes, far less than max_tokens, which clients set high. On lengths like ShareGPT's
    # (docs/paging.md) 16 fills 95 % of a pool with tokens, where 64 fills 88 %, and serves within 1 % of the best.
    expected_growth_tokens: int = 16
    max_waiting: int = 1024  # requests

    def __post_init__(self) -> None:
        for name, least in (
            ("block_size", 1),
            ("num_blocks", 2),
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("expected_growth_tokens", 0),
            ("max_waiting", 1),
        ):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            # Every running request may decode in every step.
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that hold KV: all but the null block."""
        return self.num_blocks - 1

    def check_pool_holds_context(self) -> None:
        """Proves that every request of at most `max_model_len` tokens can run, alone if need be.

        Raises:
            ValueError: it cannot; the message says what would be allowed.
        """
        needed = num_blocks_for(self.max_model_len, self.block_size)
        if needed > self.num_usable_blocks:
            raise ValueError(
                f"a pool of num_blocks={self.num_blocks} blocks (one is the null block) of "
                f"block_size={self.block_size} tokens cannot hold one context of "
                f"max_model_len={self.max_model_len} tokens: "
                f"num_blocks must be at least {needed + 1}, "
                f"or max_model_len at most {self.num_usable_blocks * self.block_size}"
            )

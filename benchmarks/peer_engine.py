"""The measurements of `benchmarks.engine` on vLLM, by the interpreter that has it. Imports nothing of ours.

    VLLM_PYTHON benchmarks/peer_engine.py MODEL_FOLDER --dtype bfloat16 --json FILE

One thread on the cores that the process may run on, one process, compiled (vLLM's default), prefix cache on, block size
32. `benchmarks.versus` runs it beside ours and prints ratios.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

# Before vLLM is imported. One process, so that a step can be seen.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class Peer:
    """vLLM's engine, one step at a time."""

    def __init__(self, model: str, dtype: str) -> None:
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._llm = LLM(
            model=model,
            dtype=dtype,
            max_model_len=4096,
            block_size=32,
            max_num_batched_tokens=2048,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self._num_requests = 0

    def add(self, num_prompt_tokens: int, max_tokens: int, seed: int) -> None:
        prompt = [1000 + (seed * 7919 + i * i * 31 + i) % 40_000 for i in range(num_prompt_tokens)]
        params = self._params(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._num_requests += 1
        self._llm.llm_engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt}, params)

    def step(self) -> dict[str, int]:
        """How many tokens each request that advanced has now."""
        return {out.request_id: len(out.outputs[0].token_ids) for out in self._llm.llm_engine.step()}

    def finish(self) -> None:
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()

    def clear(self) -> None:
        self._llm.reset_prefix_cache()


def decode(peer: Peer, batch: int) -> float:
    peer.clear()
    for seed in range(batch):
        peer.add(128, 128, seed)
    counts: dict[str, int] = {}
    while len(counts) < batch:
        counts |= peer.step()
    given, start = sum(counts.values()), time.perf_counter()
    peer.finish()
    return (batch * 128 - given) / (time.perf_counter() - start)


def prefill(peer: Peer, batch: int, length: int) -> float:
    peer.clear()
    start = time.perf_counter()
    for seed in range(batch):
        peer.add(length, 1, seed)
    peer.finish()
    return batch * length / (time.perf_counter() - start)


def ttft(peer: Peer, *, hit: bool) -> float:
    peer.clear()
    if hit:
        peer.add(1024, 1, seed=1)
        peer.finish()
    start = time.perf_counter()
    peer.add(1024, 1, seed=1)
    peer.finish()
    return 1000 * (time.perf_counter() - start)


MEASURES: dict[str, tuple[str, Any]] = {
    "decode, batch 1": ("tok/s", lambda peer: decode(peer, 1)),
    "decode, batch 8": ("tok/s", lambda peer: decode(peer, 8)),
    "decode, batch 32": ("tok/s", lambda peer: decode(peer, 32)),
    "prefill, 1 × 1,024": ("tok/s", lambda peer: prefill(peer, 1, 1024)),
    "prefill, 8 × 512": ("tok/s", lambda peer: prefill(peer, 8, 512)),
    "TTFT, 1,024 tokens, miss": ("ms", lambda peer: ttft(peer, hit=False)),
    "TTFT, 1,024 tokens, hit": ("ms", lambda peer: ttft(peer, hit=True)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ |= _ENVIRONMENT
    start = time.perf_counter()
    peer = Peer(arguments.model, arguments.dtype)
    results: dict[str, object] = {"ready": {"unit": "s", "median": time.perf_counter() - start}}
    for name, (unit, measure) in MEASURES.items():
        measure(peer)
        values = [measure(peer) for _ in range(arguments.repeat)]
        results[name] = {"unit": unit, "median": statistics.median(values), "values": values}
    arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()

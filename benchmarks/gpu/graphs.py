"""Section `graphs`: decode steps with CUDA graphs and without, each with a pool of its own."""

from pathlib import Path

from benchmarks.gpu.pools import new_pool
from benchmarks.gpu.section import Section, Setting
from benchmarks.gpu.tiny_model import write_tiny_model
from engine.config import Dtype, EngineConfig
from engine.engine import Engine
from engine.offline import generate
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.torch_executor import TorchExecutor

_NUM_REQUESTS = 11  # that end at different steps: the batch shrinks through every size
_CONFIG = EngineConfig(num_blocks=256, max_model_len=512, max_num_batched_tokens=64, max_num_seqs=16)


def run(section: Section, setting: Setting) -> None:
    if not setting.on_gpu:
        section.note("there are no graphs on a CPU")
        return
    path = write_tiny_model(setting.folder / "graphs", head_dim=64)
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        with section.part(f"graphs {dtype}"):
            plain, replayed = (_outputs(path, setting, dtype, max_graph_batch) for max_graph_batch in (0, 12))
            same = sum(replayed[key] == plain[key] for key in plain)
            if dtype == "float32":
                section.check("tokens with graphs and without are equal, float32", same == len(plain), same)
            else:
                # A padded matrix product may round otherwise, and two tokens of a random model be as good.
                section.figure("requests equal with graphs and without, bfloat16", same, f"of {len(plain)}")


def _outputs(path: Path, setting: Setting, dtype: Dtype, max_graph_batch: int) -> dict[str, list[int]]:
    executor = TorchExecutor(
        path,
        dtype=dtype,
        device=setting.device,
        attention_backend="triton",
        max_graph_batch=max_graph_batch,
        max_model_len=_CONFIG.max_model_len,
    )
    engine = Engine(_CONFIG, executor, new_pool(setting.device, _CONFIG.num_blocks * executor.layout.bytes_per_block))
    requests = [
        Request(
            str(i),
            [1 + (i * 7 + j) % 200 for j in range(5 + 13 * i)],
            SamplingParams(max_tokens=8 + 2 * i, temperature=0.0),
            arrival_time=0.0,
        )
        for i in range(_NUM_REQUESTS)
    ]
    return generate(engine, requests, lambda: 0.0)

"""Section `kernels`: each kernel against its reference, on the device."""

from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu.attention_case import CASES, Case, Step
from benchmarks.gpu.pools import as_blocks, new_pool, pattern
from benchmarks.gpu.section import Section, Setting
from engine.attention import get_backend
from engine.attention.reference import ReferenceBackend
from engine.executor import SamplingInput
from engine.memory import KVLayout
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from kvtransfer.mapping import PeerPool, open_mapping

# Largest difference from the reference in float32, relative to 1 + |expected|: the dtypes' own rounding.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


def run(section: Section, setting: Setting) -> None:
    with section.part("copies"):
        _copies(section, setting)
    with section.part("sampler"):
        _sampler(section, setting)
    check_attention(section, setting, "triton" if setting.on_gpu else "cpu")


def check_attention(section: Section, setting: Setting, name: str) -> None:
    """A backend on every case that it serves."""
    for case in CASES:
        if not serves(name, case):
            continue
        with section.part(f"{name} {case.name}"):
            difference, written = _differences(case, name, setting.device)
            section.check(f"{name} {case.name}", difference <= _TOLERANCE[case.dtype] and written, f"{difference:.1e}")


def serves(name: str, case: Case) -> bool:
    if name == "flashinfer":
        return case.dtype is not torch.float32
    return not (name == "cpu" and case.kv_dtype is not None)


def _differences(case: Case, name: str, device: str) -> tuple[float, bool]:
    """The largest difference from the reference, and whether the pool is the same in every byte."""
    step, reference_step = Step(case, device), Step(case, device)
    backend, reference = get_backend(name, device=device), ReferenceBackend(device=device)
    backend.prepare(case.shape)
    out = step.run(backend)
    reference.prepare(case.shape)
    reference.plan(reference_step.metadata)
    reference_step.write(reference)
    written = torch.equal(step.pool.view(torch.uint8), reference_step.pool.view(torch.uint8))
    wide = Step(replace(case, dtype=torch.float32, kv_dtype=None), device)
    wide.q = reference_step.q.float()
    wide.pool = reference_step.pool.float()
    expected = reference.attend(wide.q, wide.pool[:, 1], window=case.window, scales=case.scales)
    return float(((out.float() - expected).abs() / (1 + expected.abs())).max()), written


def _copies(section: Section, setting: Setting) -> None:
    """Blocks from one pool of this process to another, of odd sizes too."""
    for bytes_per_block in (96, 1000, 4096, 1 << 16):
        layout = KVLayout(16, bytes_per_block, bytes(16))
        source, target = (new_pool(setting.device, 64 * bytes_per_block) for _ in range(2))
        source_blocks, target_blocks = as_blocks(source, bytes_per_block), as_blocks(target, bytes_per_block)
        ids = torch.arange(64, device=source_blocks.device)
        source_blocks.copy_(pattern(ids, bytes_per_block, salt=1))
        if setting.on_gpu:
            torch.cuda.synchronize()
        handle = source.handle("here", layout)
        peer = PeerPool(handle, open_mapping(handle))
        permutation = np.random.default_rng(0).permutation(63) + 1
        copies = target.copies(layout)
        copies.copy(peer, permutation.tolist(), list(range(1, 64)), None)
        expected = torch.zeros_like(target_blocks)
        expected[1:] = source_blocks[torch.from_numpy(permutation).to(ids.device)]
        section.check(f"copy of blocks of {bytes_per_block} bytes", torch.equal(target_blocks, expected))
        copies.close()
        peer.retire()
        target.close()
        source.close()


def _sampler(section: Section, setting: Setting) -> None:
    """The device's tokens beside the CPU's; a draw whose first two are as close as rounding may differ."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((64, 32_000), generator=generator) * 3
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 40},
        {"temperature": 1.2, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.9, "top_p": 0.95, "top_k": 100, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 1.0, "logprobs": 5},
        {"temperature": 0.0, "logit_bias": {7: 50.0}, "presence_penalty": 1.0},
    )
    inputs = [
        SamplingInput(
            SamplingParams(max_tokens=16, seed=row, **kinds[row % len(kinds)]),
            [row, 5, 9],
            [7, 7, row],
        )
        for row in range(len(logits))
    ]
    expected = Sampler().sample(logits, inputs)
    sampled = DeviceSampler().sample(logits.to(setting.device), inputs)
    equal = sum(a.token_id == b.token_id for a, b in zip(expected, sampled, strict=True))
    greedy = all(
        a.token_id == b.token_id
        for a, b, i in zip(expected, sampled, inputs, strict=True)
        if i.params.temperature == 0.0
    )
    section.check("sampled tokens are the CPU's", equal >= len(inputs) - 1 and greedy, f"{equal} of {len(inputs)}")

"""Section `flashinfer`: its backend on every case, and its kernels' time beside ours.

The last of all, and apart from them: where FlashInfer has to compile it may take all the time that is left.
"""

from benchmarks.gpu.kernels import check_attention
from benchmarks.gpu.section import Section, Setting
from benchmarks.gpu.speed import time_kernels
from engine.attention.flashinfer_install import why_not_flashinfer


def run(section: Section, setting: Setting) -> None:
    reason = "it needs a GPU" if not setting.on_gpu else why_not_flashinfer()
    if reason is not None:
        section.note(f"not tried: {reason}")
        return
    with section.part("time of kernels"):
        time_kernels(section, setting, ("triton", "flashinfer"))
    check_attention(section, setting, "flashinfer")

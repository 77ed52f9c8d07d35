"""The GPU path on a real GPU: checks against the reference, then figures.

    make test-gpu            or: python -m benchmarks.gpu [--device cuda] [--json FILE] [--sections kernels,ipc,…]

Runs from a bare checkout, with whatever the interpreter has: torch, CuPy and triton, numpy, numba and safetensors;
FlashInfer if it is there. Every section is a process of its own with a deadline of its own, so that a kernel that
crashes or hangs costs one section and no more:

    kernels    block copies, sampling and attention, against their references
    ipc        two processes on one GPU: blocks gathered through a mapping, 20 rounds in which only an event orders them
    handoff    a tiny model, prefilled in one process and decoded in another: the tokens of one process alone
    graphs     decode steps as CUDA graphs: the tokens of plain ones
    speed      copies beside a plain device copy, hand-offs of an 8B model's KV, attention kernels, decoding
    restarts   an owner of a pool that dies and comes back, 50 times: the GPU's memory stays flat
    flashinfer its backend against the reference, and its kernels beside ours; where it can run

`--device cpu` runs the same script on the CPU's pools and kernels, small: it checks the script, not the speed.
"""

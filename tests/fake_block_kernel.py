"""The gather-copy kernel as a played GPU runs it."""

import struct
from collections.abc import Callable

from engine.memory import KVLayout
from fake_cuda import FakeProcess
from kvtransfer.cuda_copies import CudaCopies
from kvtransfer.cuda_ipc import CudaIpcMemory


class FakeBlockKernel:
    """Implements `block_copy.BlockKernel` over a process of `FakeMachine`: reads ids and blocks when it is run."""

    def __init__(self, process: FakeProcess) -> None:
        self._process = process
        self.num_launches = 0
        self.on_launch: Callable[[], None] = lambda: None

    def __call__(
        self,
        stream: int,
        source: int,
        target: int,
        source_ids: int,
        target_ids: int,
        num_blocks: int,
        bytes_per_block: int,
    ) -> None:
        view = self._process.view

        def run() -> None:
            ids = [
                struct.unpack(f"<{num_blocks}i", view(pointer, 4 * num_blocks)) for pointer in (source_ids, target_ids)
            ]
            for source_id, target_id in zip(*ids, strict=True):
                block = view(source + source_id * bytes_per_block, bytes_per_block)
                view(target + target_id * bytes_per_block, bytes_per_block)[:] = block

        self.on_launch()
        self.num_launches += 1
        self._process.launch(stream, run)


class FakeGpuMemory(CudaIpcMemory):
    """A pool on a played GPU, whose copies are played too."""

    def copies(self, layout: KVLayout) -> CudaCopies:
        assert isinstance(self.runtime, FakeProcess)
        return CudaCopies(self, layout.bytes_per_block, FakeBlockKernel(self.runtime))

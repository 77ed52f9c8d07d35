"""The GPU that a process computes on."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from engine.config import EngineConfig
from engine.cuda.budget import activation_bytes, num_blocks_that_fit

if TYPE_CHECKING:
    import torch

    from engine.torch_executor import TorchExecutor


@dataclass(frozen=True, slots=True)
class Gpu:
    """One, as this process numbers it. Across processes only the UUID names it."""

    number: int
    name: str
    uuid: str

    def __str__(self) -> str:
        return f"cuda: {self.name}, GPU-{self.uuid}"

    @classmethod
    def of_torch(cls, device: "torch.device") -> Self:
        """The one that torch calls `device`."""
        import torch

        properties = torch.cuda.get_device_properties(device)
        return cls(device.index, properties.name, str(properties.uuid))

    def num_blocks_that_fit(self, executor: "TorchExecutor", config: EngineConfig, utilization: float) -> int:
        """Blocks for which this process stays within `utilization` of the GPU's memory, its weights being loaded."""
        import torch

        free, total = torch.cuda.mem_get_info(self.number)
        return num_blocks_that_fit(
            total=total,
            free=free,
            taken=torch.cuda.memory_reserved(self.number),
            activations=activation_bytes(
                executor.config,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                item_bytes=executor.item_bytes,
            ),
            utilization=utilization,
            bytes_per_block=executor.layout.bytes_per_block,
        )

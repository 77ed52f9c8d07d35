"""How hand-offs ended: counted here, exported by the worker's metrics. Every fallback and expiry is one of these."""

from collections import Counter
from dataclasses import dataclass, field

from kvtransfer.errors import Code
from kvtransfer.holder import HolderEnd


@dataclass(slots=True)
class HolderCounters:
    """Of all hand-offs that a worker gave out."""

    opened: int = 0
    ends: Counter[HolderEnd] = field(default_factory=Counter)
    staged: int = 0  # of those opened, out of copies in host memory
    stale_blocks: int = 0  # that a consumer hoped to find cached, in vain


@dataclass(slots=True)
class ConsumerCounters:
    """Of all hand-offs that a worker took in: opened = committed + aborted + lost + under way."""

    opened: int = 0
    committed: int = 0
    aborted: int = 0
    lost: Counter[Code] = field(default_factory=Counter)  # why the holder was given up
    staged: int = 0  # of those opened, out of copies in host memory
    unmappable_pools: int = 0  # of peers' instances, that cannot be mapped here: their hand-offs are staged
    stale_blocks: int = 0  # that this worker hoped a holder had cached, in vain

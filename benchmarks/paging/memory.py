"""Section `memory`: the share of the KV memory that holds tokens, who runs in it, and the throughput that follows."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.paging.allocators import BuddyAllocator, FirstFitAllocator
from benchmarks.paging.kv_memory import RESERVATIONS, ContiguousMemory, PagedMemory
from benchmarks.paging.lengths import Workload
from benchmarks.paging.report import Column, Table
from benchmarks.paging.scheduled import MAX_NUM_BATCHED_TOKENS, simulate_scheduled
from benchmarks.paging.simulation import Occupancy, StepTime, simulate
from engine.config import EngineConfig

# Kwon et al.: the share that holds tokens (figure 2) and requests in a batch (figure 13a, OPT-13B, 2 requests/s), %.
PUBLISHED = {"max": (20.4, 7.00), "pow2": (26.8, 9.81), "oracle": (38.2, 13.62), "paged": (96.3, 30.42)}

# The paper's table 1: 15.7k slots for contexts of 2,048 tokens. Other workloads get as many of their longest contexts.
CONTEXTS_IN_MEMORY = 7.68

COLUMNS = (
    Column("memory"),
    Column("holds tokens, %", ".1f"),
    Column("published, %", ".1f"),
    Column("for later tokens, %", ".1f"),
    Column("never used, %", ".1f"),
    Column("free, %", ".1f"),
    Column("running", ".1f"),
    Column("published running", ".1f"),
    Column("preempted / request", ".2f"),
    Column("tokens/s", ",.0f"),
    Column("× max", ".2f"),
)


@dataclass(frozen=True, slots=True)
class MemorySetting:
    """How the section runs."""

    block_size: int
    step_time: StepTime
    num_slots: int | None  # None: `CONTEXTS_IN_MEMORY` of the workload's longest contexts
    growths: tuple[int, ...]  # expected_growth_tokens of the engine's scheduler to be tried

    def num_slots_for(self, workload: Workload) -> int:
        return self.num_slots or int(CONTEXTS_IN_MEMORY * workload.max_len)


def memory_table(workload: Workload, setting: MemorySetting) -> Table:
    """
    Raises:
        ValueError: the memory is too small for a request, or the requests are too few.
    """
    num_slots = setting.num_slots_for(workload)
    title = (
        f"{workload.name}: {len(workload.requests):,} requests, more than fit, in memory for {num_slots:,} tokens; "
        f"contexts of up to {workload.max_len:,}, blocks of {setting.block_size}"
    )
    default = EngineConfig(num_blocks=2, max_model_len=2).expected_growth_tokens
    table = Table(
        f"memory of {workload.name}",
        title,
        COLUMNS,
        notes=[
            (
                f"the scheduler computes at most {MAX_NUM_BATCHED_TOKENS:,} tokens a step: where prompts are long, "
                "that and not memory may limit who runs"
            ),
            f"growth: expected_growth_tokens, {default} unless it is said",
        ],
    )
    if workload.is_as_published:
        table.notes.append("published: Kwon et al., figures 2 and 13a (OPT-13B, ShareGPT, 2 requests a second)")
    baseline = None
    for name, published, occupancy in _occupancies(workload, setting, num_slots):
        baseline = baseline or occupancy.output_tokens_per_s
        share, running = PUBLISHED.get(published if workload.is_as_published else "", (None, None))
        table.add(
            name,
            100 * occupancy.tokens,
            share,
            100 * occupancy.promised,
            100 * occupancy.unused,
            100 * occupancy.free,
            occupancy.num_running,
            running,
            occupancy.preemptions_per_request,
            occupancy.output_tokens_per_s,
            occupancy.output_tokens_per_s / baseline,
        )
    return table


def _occupancies(workload: Workload, setting: MemorySetting, num_slots: int) -> Iterator[tuple[str, str, Occupancy]]:
    """A row's name, the key of what is published, if the paper has it, and what was found; `max` first."""
    requests, step_time, block_size = workload.requests, setting.step_time, setting.block_size
    for kind, allocator in (("buddy", BuddyAllocator), ("first fit", FirstFitAllocator)):
        for name, reservation in RESERVATIONS.items():
            memory = ContiguousMemory(allocator(num_slots), reservation, workload.max_len)
            published = name if kind == "buddy" else ""  # the paper's allocator
            yield f"{name}, {kind}", published, simulate(memory, requests, step_time)
    yield "paged", "paged", simulate(PagedMemory(num_slots, block_size), requests, step_time)
    for growth in setting.growths:
        occupancy = simulate_scheduled(
            workload, step_time, num_slots=num_slots, block_size=block_size, expected_growth_tokens=growth
        )
        yield f"scheduler, growth {growth}", "", occupancy

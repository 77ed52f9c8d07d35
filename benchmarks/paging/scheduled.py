"""The same load on the engine's own scheduler: its admission, its chunks, its preemption, its prefix cache.

It admits a request only when the pool also holds what all running requests are expected to generate, so it leaves
memory free that the plain simulation fills, and preempts where that one thrashes.
"""

from benchmarks.paging.lengths import Lengths, Workload
from benchmarks.paging.simulation import LoadWindow, Occupancy, OccupancyMeter, Place, StepTime
from engine.config import EngineConfig
from engine.executor import ModelOutput, SampledToken, SchedulerOutput
from engine.kvcache.manager import KVCacheManager
from engine.kvcache.spec import FullAttentionSpec
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler

MAX_NUM_BATCHED_TOKENS = 2048  # a step's budget

_MORE, _STOP = SampledToken(0), SampledToken(1)


def simulate_scheduled(
    workload: Workload, step_time: StepTime, *, num_slots: int, block_size: int, expected_growth_tokens: int
) -> Occupancy:
    """As `simulate`, with the scheduler deciding; nobody tells it how much a request will generate.

    Raises:
        ValueError: a request does not fit even alone, or there are too few for a load.
    """
    num_blocks, num_requests = num_slots // block_size, len(workload.requests)
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=workload.max_len + 1,
        block_size=block_size,
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, num_requests),
        expected_growth_tokens=expected_growth_tokens,
        max_waiting=num_requests,
    )
    manager = KVCacheManager(num_blocks, [FullAttentionSpec(block_size)])
    scheduler = Scheduler(config, manager, fingerprint=bytes(16), vocab_size=num_requests + 2)
    for index, lengths in enumerate(workload.requests):
        scheduler.add_request(_request(index, lengths, workload.max_len))
    meter, window = OccupancyMeter(num_slots, step_time), LoadWindow()
    while scheduler.requests.has_work:
        step = scheduler.schedule(now=0.0).step
        if window.is_open(len(scheduler.requests.running), len(scheduler.requests.waiting)):
            num_sampled = sum(scheduled.sampling is not None for scheduled in step.requests)
            places = _places(scheduler, step, workload)
            meter.add(places, num_computed=step.num_tokens, num_sampled=num_sampled)
        outputs, _ = scheduler.update(step, _sample(step, workload))
        window.num_finished += sum(output.finish_reason is not None for output in outputs)
        manager.pool.take_events()  # as a worker does every step
    return meter.mean(scheduler.counters.num_preemptions / num_requests)


def _request(index: int, lengths: Lengths, max_len: int) -> Request:
    # The first token is the request's own: no two share a prefix.
    prompt = [index + 2] + [0] * (lengths.prompt - 1)
    params = SamplingParams(max_tokens=max_len - lengths.prompt, stop_token_ids=(_STOP.token_id,))
    return Request(str(index), prompt, params, arrival_time=0.0)


def _sample(step: SchedulerOutput, workload: Workload) -> ModelOutput:
    """Every request stops when it has as many tokens as its length says."""
    sampled = {}
    for scheduled in step.requests:
        if scheduled.sampling is not None:
            is_last = scheduled.sampling.position + 1 == workload.requests[int(scheduled.request_id)].total
            sampled[scheduled.request_id] = _STOP if is_last else _MORE
    return ModelOutput(sampled)


def _places(scheduler: Scheduler, step: SchedulerOutput, workload: Workload) -> list[Place]:
    num_scheduled = {scheduled.request_id: len(scheduled.token_ids) for scheduled in step.requests}
    return [
        Place(
            num_tokens=request.num_computed_tokens + num_scheduled.get(request.request_id, 0),
            num_final_tokens=workload.requests[int(request.request_id)].total - 1,
            num_granted=scheduler.manager.num_held_blocks(request.request_id) * scheduler.manager.block_size,
        )
        for request in scheduler.requests.running
    ]

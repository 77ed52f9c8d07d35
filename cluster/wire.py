"""Between the gateway's own types and the worker's protobuf messages; the only file of `cluster` that knows both."""

from collections.abc import Iterable, Sequence

from cluster.generator import SequenceRequest, StageTimes
from cluster.plan import Plan
from cluster.session_messages import NeedPrefill, Output
from cluster.worker_info import Role, WorkerInfo, WorkerLoad
from engine.executor import SampledToken
from engine.kvcache.block_hash import BlockHash, split_hashes
from engine.kvcache.events import BlocksRemoved, BlocksStored, CacheCleared, KVEvent
from engine.sampling_params import FinishReason
from kvtransfer.sampling_wire import prompt_logprobs_from_wire, sampled_token_from_wire, sampling_params_to_wire
from tandem.v1 import sampling_pb2 as sampling_pb
from tandem.v1 import worker_pb2 as pb

_ROLES = {pb.ROLE_PREFILL: Role.PREFILL, pb.ROLE_DECODE: Role.DECODE}
_FINISH_REASONS: dict[int, FinishReason | None] = {
    sampling_pb.FINISH_REASON_UNSPECIFIED: None,
    sampling_pb.FINISH_REASON_STOP: FinishReason.STOP,
    sampling_pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    sampling_pb.FINISH_REASON_ABORT: FinishReason.ABORT,
}


class WireError(ValueError):
    """A worker sent what it must not: another version, or a bug in it."""


# --- what a worker is


def worker_info(message: pb.DescribeResponse, address: str) -> WorkerInfo:
    """A worker's description.

    Args:
        address: where it was reached.
    """
    role = _ROLES.get(message.role)
    if role is None:
        raise WireError(f"the worker at {address} has the unknown role {message.role}")
    return WorkerInfo(
        worker_id=message.worker_id,
        instance_id=message.instance_id,
        role=role,
        address=address,
        model_name=message.model_name,
        model_path=message.model_path,
        fingerprint=message.fingerprint,
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        max_model_len=message.max_model_len,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        vocab_size=message.vocab_size,
        bytes_per_block=message.bytes_per_block,
        dtype=message.dtype,
        metrics_address=message.metrics_address,
        host_id=message.host_id,
        device=message.device or "cpu",
    )


def worker_load(message: pb.Load) -> WorkerLoad:
    return WorkerLoad(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_transferring=message.num_transferring,
        num_free_blocks=message.num_free_blocks,
        num_cached_blocks=message.num_cached_blocks,
        num_active_blocks=message.num_active_blocks,
        num_waiting_tokens=message.num_waiting_tokens,
        draining=message.draining,
    )


def _peer(info: WorkerInfo) -> pb.Peer:
    return pb.Peer(worker_id=info.worker_id, instance_id=info.instance_id, address=info.address)


# --- gateway → worker


def submit(
    wire_id: str,
    request: SequenceRequest,
    plan: Plan,
    resume_token_ids: Sequence[int],
    timeout_s: float,
    choices: Sequence[tuple[str, int]] = (),
) -> pb.SessionRequest:
    """A prompt on its way to `plan.decode`.

    Args:
        wire_id: names the one sequence; with choices: the prompt.
        request: the one sequence; with choices: any of them.
        resume_token_ids: generated elsewhere and already delivered.
        timeout_s: what is left of its time.
        choices: (wire id, seed) of each, if there are several.
    """
    message = pb.Submit(
        request_id=wire_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=sampling_params_to_wire(request.params),
        plan=pb.Plan(num_cached_blocks=plan.num_cached_blocks),
        resume_token_ids=resume_token_ids,
        cache_salt=request.cache_salt,
        priority=request.priority,
        # 0 would mean the worker's default.
        timeout_ms=max(1, round(timeout_s * 1000)),
        choices=[pb.Choice(request_id=choice_id, seed=seed) for choice_id, seed in choices],
    )
    if plan.prefill is not None:
        message.plan.prefill_worker.CopyFrom(_peer(plan.prefill))
    if plan.cached_on is not None:
        message.plan.cached_on.CopyFrom(_peer(plan.cached_on))
    return pb.SessionRequest(submit=message)


def assign(wire_id: str, prefill: WorkerInfo | None) -> pb.SessionRequest:
    """The answer to `NeedPrefill`; None: prefill the rest yourself."""
    message = pb.Assign(request_id=wire_id)
    if prefill is not None:
        message.prefill_worker.CopyFrom(_peer(prefill))
    return pb.SessionRequest(assign=message)


def abort(wire_ids: Iterable[str]) -> pb.SessionRequest:
    return pb.SessionRequest(abort=pb.Abort(request_ids=wire_ids))


# --- worker → gateway


def output(message: pb.RequestOutput) -> Output:
    """One request's part of a step."""
    if message.logprobs and len(message.logprobs) != len(message.token_ids):
        raise WireError(f"{len(message.logprobs)} logprobs for {len(message.token_ids)} tokens")
    logprobs = message.logprobs or [None] * len(message.token_ids)
    try:
        tokens = tuple(map(sampled_token_from_wire, message.token_ids, logprobs))
    except ValueError as exc:
        raise WireError(f"top logprobs of {message.request_id}: {exc}") from exc
    stages = message.stages
    return Output(
        tokens=tokens,
        finish_reason=_finish_reason(message.finish_reason),
        matched_token_id=message.matched_token_id if message.HasField("matched_token_id") else None,
        num_cached_tokens=message.usage.num_cached_tokens if message.HasField("usage") else None,
        stages=StageTimes(stages.queued, stages.prefill, stages.transfer, stages.decode)
        if message.HasField("stages")
        else None,
    )


def _finish_reason(number: int) -> FinishReason | None:
    try:
        return _FINISH_REASONS[number]
    except KeyError:
        raise WireError(f"unknown finish reason {number}") from None


def prompt_logprobs(message: sampling_pb.PromptLogprobs, prompt_token_ids: Sequence[int]) -> tuple[SampledToken, ...]:
    """Of a prompt's tokens, from the second on."""
    try:
        return prompt_logprobs_from_wire(message, prompt_token_ids)
    except ValueError as exc:
        raise WireError(str(exc)) from exc


def need_prefill(message: pb.NeedPrefill) -> NeedPrefill:
    return NeedPrefill(message.reason, message.num_confirmed_blocks, message.failed_worker_id)


# --- KV events


def block_hashes(joined: bytes) -> tuple[BlockHash, ...]:
    """Concatenated hashes, apart."""
    try:
        return split_hashes(joined)
    except ValueError as exc:
        raise WireError(str(exc)) from exc


def kv_events(message: pb.Batch) -> tuple[KVEvent, ...]:
    """The changes of a batch, in order."""
    return tuple(_kv_event(change) for change in message.changes)


def _kv_event(change: pb.CacheChange) -> KVEvent:
    match change.WhichOneof("change"):
        case "stored":
            return BlocksStored(block_hashes(change.stored))
        case "removed":
            return BlocksRemoved(block_hashes(change.removed))
        case "cleared":
            return CacheCleared()
        case other:
            raise WireError(f"unknown change of a cache: {other}")

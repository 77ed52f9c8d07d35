"""The gateway's side of the wire."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster import wire
from cluster.generator import StageTimes
from cluster.plan import Plan
from cluster.session_messages import NeedPrefill, Output
from cluster.worker_info import Role
from engine.executor import SampledToken
from engine.kvcache.block_hash import BlockHash
from engine.kvcache.events import BlocksRemoved, BlocksStored, CacheCleared
from engine.sampling_params import FinishReason, SamplingParams
from fake_cluster import request
from fake_worker import FakeWorker
from kvtransfer.sampling_wire import prompt_logprobs_to_wire, sampling_params_from_wire
from tandem.v1 import sampling_pb2 as sampling_pb
from tandem.v1 import worker_pb2 as pb


def worker(name: str, role: Role = Role.DECODE) -> pb.DescribeResponse:
    return FakeWorker(name, role).description


def test_a_description_arrives_whole() -> None:
    info = wire.worker_info(worker("p0", Role.PREFILL), "somewhere:1")
    assert (info.worker_id, info.role, info.address, info.block_size) == ("p0", Role.PREFILL, "somewhere:1", 4)
    # Of a worker that does not say: on a CPU, and on any host.
    assert (info.host_id, info.device) == ("", "cpu")
    described = worker("p0")
    described.host_id, described.device = "boot/1", "cuda: a card, GPU-1"
    info = wire.worker_info(described, "somewhere:1")
    assert (info.host_id, info.device) == ("boot/1", "cuda: a card, GPU-1")


def test_a_submitted_request_carries_plan_resumption_and_every_sampling_parameter() -> None:
    params = SamplingParams(
        max_tokens=9,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias={5: -100.0},
        seed=2**63 - 1,
        logprobs=0,
        prompt_logprobs=3,
        min_tokens=2,
        stop_token_ids=(1, 2),
    )
    decode, prefill = (wire.worker_info(worker(n), f"{n}:1") for n in ("d0", "p0"))
    sequence = request((4, 5), params=params, cache_salt="s", priority=-1)
    submit = wire.submit("r", sequence, Plan(decode, prefill, decode, 3, 0), [6, 7], 0.0001).submit
    assert sampling_params_from_wire(submit.sampling_params) == params
    assert (list(submit.prompt_token_ids), list(submit.resume_token_ids)) == ([4, 5], [6, 7])
    assert (submit.plan.prefill_worker.address, submit.plan.cached_on.address) == ("p0:1", "d0:1")
    assert (submit.plan.num_cached_blocks, submit.cache_salt, submit.priority) == (3, "s", -1)
    assert submit.timeout_ms == 1  # never 0, which would mean the worker's default
    local = wire.submit("r", sequence, Plan(decode, None, None, 0, 2), [], 1.0).submit
    assert not local.plan.HasField("prefill_worker")
    assert not local.plan.HasField("cached_on")
    assert not local.choices
    several = wire.submit("p", sequence, Plan(decode, None, None, 0, 2), [], 1.0, [("a", -1), ("b", 2**63 - 1)]).submit
    assert several.request_id == "p"
    assert [(choice.request_id, choice.seed) for choice in several.choices] == [("a", -1), ("b", 2**63 - 1)]


def test_log_probabilities_of_another_prompt_break_the_protocol() -> None:
    tokens = (SampledToken(5, -0.5, ((7, -0.25),)),)
    message = prompt_logprobs_to_wire(tokens, 1)
    assert wire.prompt_logprobs(message, [4, 5]) == tokens
    with pytest.raises(wire.WireError, match="of 1 tokens for a prompt of 3"):
        wire.prompt_logprobs(message, [4, 5, 6])


def test_an_output_arrives_whole() -> None:
    message = pb.RequestOutput(
        request_id="r",
        token_ids=[3, 4],
        logprobs=[sampling_pb.TokenLogprobs(logprob=-0.5, top_token_ids=[3], top_logprobs=[-0.5])] * 2,
        finish_reason=sampling_pb.FINISH_REASON_STOP,
        matched_token_id=0,
        usage=pb.Usage(num_cached_tokens=16),
        stages=pb.StageTimes(queued=0.5, decode=2.0),
    )
    assert wire.output(message) == Output(
        tokens=(SampledToken(3, -0.5, ((3, -0.5),)), SampledToken(4, -0.5, ((3, -0.5),))),
        finish_reason=FinishReason.STOP,
        matched_token_id=0,
        num_cached_tokens=16,
        stages=StageTimes(0.5, 0.0, 0.0, 2.0),
    )
    assert wire.output(pb.RequestOutput(token_ids=[3])) == Output((SampledToken(3),), None)


@pytest.mark.parametrize(
    "message",
    [
        pb.RequestOutput(token_ids=[1], logprobs=[sampling_pb.TokenLogprobs()] * 2),
        pb.RequestOutput(token_ids=[1], logprobs=[sampling_pb.TokenLogprobs(top_token_ids=[1, 2], top_logprobs=[0.0])]),
        pb.RequestOutput(token_ids=[1], finish_reason=99),  # type: ignore[arg-type]
    ],
    ids=["a logprob too many", "tops that do not pair up", "an unknown finish reason"],
)
def test_an_output_that_contradicts_itself_is_a_breach(message: pb.RequestOutput) -> None:
    with pytest.raises(wire.WireError):
        wire.output(message)


def test_need_prefill_and_events_arrive_in_order() -> None:
    assert wire.need_prefill(pb.NeedPrefill(reason="x", num_confirmed_blocks=2, failed_worker_id="p")) == NeedPrefill(
        "x", 2, "p"
    )
    a, b = (BlockHash(bytes([i]) * 16) for i in range(2))
    changes = [pb.CacheChange(removed=a + b), pb.CacheChange(cleared=True), pb.CacheChange(stored=b)]
    assert wire.kv_events(pb.Batch(changes=changes)) == (BlocksRemoved((a, b)), CacheCleared(), BlocksStored((b,)))
    with pytest.raises(wire.WireError, match="unknown change"):
        wire.kv_events(pb.Batch(changes=[pb.CacheChange()]))


def test_the_gateway_process_loads_neither_torch_nor_numba() -> None:
    root = Path(__file__).parents[2]
    code = (
        "import sys; sys.path[:0] = ['.', 'proto']; import cluster.gateway, cluster.membership; "
        "print(sorted({'torch', 'numba'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"

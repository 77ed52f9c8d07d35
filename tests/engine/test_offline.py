"""Generating without a server."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from engine.hash_executor import expected_tokens
from engine.offline import generate
from tests.engine.executors import VOCAB_SIZE
from tests.engine.harness import check_idle, make_engine, make_request, prompt_of


def clock():
    return itertools.count().__next__


def test_all_outputs_are_there_when_more_requests_come_than_may_wait():
    engine = make_engine(max_waiting=1)
    requests = [make_request(f"r{i}", prompt_of(5 + i, i)) for i in range(20)]
    outputs = generate(engine, requests, clock())
    assert outputs == {r.request_id: expected_tokens(r.prompt_token_ids, r.params, VOCAB_SIZE) for r in requests}
    check_idle(engine)


def test_output_begins_with_what_it_was_resumed_with():
    whole = expected_tokens(prompt_of(5), make_request().params, VOCAB_SIZE)
    request = make_request("a", prompt_of(5), resume_token_ids=whole[:2])
    assert generate(make_engine(), [request], clock()) == {"a": whole}


def test_refusal_reaches_the_caller_when_a_request_cannot_fit():
    with pytest.raises(ValueError, match="max_model_len=64"):
        generate(make_engine(), [make_request("a", [1] * 70)], clock())


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (
            "engine.kvcache.manager, engine.kvcache.block_hash, engine.kvcache.slots, engine.sampling_params",
            "torch, numba, numpy, grpc, ray",
        ),
        ("engine.engine, engine.offline, engine.config", "torch, numba, numpy, grpc, ray"),
        ("engine.hash_executor", "torch, numba, grpc, ray"),
    ],
)
def test_heavy_packages_are_not_loaded_when_deciding_is_imported(modules, forbidden):
    code = f"import sys; import {modules}; print([m for m in '{forbidden}'.split(', ') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"

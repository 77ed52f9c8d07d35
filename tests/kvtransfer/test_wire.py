"""Messages survive the wire; what makes no sense is refused."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.executor import SampledToken
from engine.sampling_params import SamplingParams
from handoffs import an_open, pool_handle, prefill
from kvtransfer.messages import (
    Accepted,
    CachedSource,
    Complete,
    Confirmed,
    ConsumerMessage,
    HolderMessage,
    Open,
    PrefillSource,
    Pulled,
    Ready,
)
from kvtransfer.sampling_wire import (
    prompt_logprobs_from_wire,
    prompt_logprobs_to_wire,
    sampling_params_from_wire,
    sampling_params_to_wire,
)
from kvtransfer.wire import request_from_wire, request_to_wire, response_from_wire, response_to_wire
from tandem.v1 import exchange_pb2, sampling_pb2

uint32 = st.integers(0, 2**32 - 1)
token_ids = st.integers(0, 2**31 - 1)
single = st.floats(width=32, allow_nan=False, allow_infinity=False)


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


params = st.builds(
    SamplingParams,
    max_tokens=st.integers(2, 2**31 - 1),
    temperature=floats(0, 100),
    top_p=floats(0, 1),
    top_k=st.integers(0, 2**31 - 1),
    min_p=floats(0, 1),
    repetition_penalty=floats(0.125, 8),
    presence_penalty=floats(-2, 2),
    frequency_penalty=floats(-2, 2),
    logit_bias=st.dictionaries(token_ids, floats(-100, 100), max_size=4),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    min_tokens=st.integers(0, 2),
    stop_token_ids=st.lists(token_ids, max_size=4).map(tuple),
)
prefills = st.builds(
    PrefillSource,
    token_ids=st.lists(token_ids, min_size=1, max_size=8).map(tuple),
    num_prompt_tokens=uint32,
    params=params,
    skip_blocks=uint32,
    cache_salt=st.text(st.characters(codec="utf-8"), max_size=8),
    priority=st.integers(-(2**31), 2**31 - 1),
    cached_on_address=st.none() | st.just("127.0.0.1:1"),
    num_cached_blocks=uint32,
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(tuple),
)
cacheds = st.builds(
    CachedSource, st.lists(st.binary(min_size=16, max_size=16), max_size=4).map(tuple), skip_blocks=uint32
)
opens = st.builds(
    Open,
    handoff_id=st.text(st.characters(codec="ascii"), max_size=8),
    request_id=st.text(st.characters(codec="ascii"), max_size=8),
    consumer_instance_id=st.just("instance"),
    fingerprint=st.binary(max_size=16),
    timeout_s=st.integers(0, 10**7).map(lambda ms: ms / 1000),
    source=prefills | cacheds,
)
tokens = st.builds(SampledToken, token_ids) | st.builds(
    SampledToken, token_ids, single, st.lists(st.tuples(token_ids, single), max_size=4).map(tuple)
)


def prompt_of(num_top: int) -> st.SearchStrategy[tuple[int, list[SampledToken]]]:
    """A number of best ones, and a prompt's tokens with as many."""
    top = st.lists(st.tuples(token_ids, single), min_size=num_top, max_size=num_top).map(tuple)
    return st.tuples(st.just(num_top), st.lists(st.builds(SampledToken, token_ids, single, top), max_size=5))


prompts = st.integers(0, 4).flatmap(prompt_of)
responses = st.one_of(
    st.builds(Accepted, uint32, uint32, st.integers(1, 10**7).map(lambda ms: ms / 1000), st.just(pool_handle())),
    st.builds(Ready, uint32, st.lists(uint32, max_size=8).map(tuple), uint32, st.integers(0, 3), st.none() | uint32),
    st.builds(
        Complete,
        st.lists(tokens, max_size=3).map(tuple),
        uint32,
        uint32,
        st.floats(0, 1e6),
        st.floats(0, 1e6),
        st.none() | prompts.map(lambda prompt: prompt_logprobs_to_wire(prompt[1], prompt[0])),
    ),
    st.builds(Confirmed, uint32),
)


@given(st.one_of(opens, st.builds(Pulled, uint32)))
def test_what_a_consumer_says_survives_the_wire(message: ConsumerMessage) -> None:
    wire = exchange_pb2.HandoffRequest.FromString(request_to_wire(message).SerializeToString())
    assert request_from_wire(wire) == message


@given(responses)
def test_what_a_holder_says_survives_the_wire(message: HolderMessage) -> None:
    wire = exchange_pb2.HandoffResponse.FromString(response_to_wire(message).SerializeToString())
    assert response_from_wire(wire) == message


def test_a_number_that_32_bits_cannot_hold_is_rounded_once_and_stays() -> None:
    sent = SamplingParams(max_tokens=1, temperature=0.7, top_p=0.95, logit_bias={3: 0.1})
    received = sampling_params_from_wire(sampling_params_to_wire(sent))
    assert received.temperature == struct.unpack("<f", struct.pack("<f", 0.7))[0]
    assert sampling_params_from_wire(sampling_params_to_wire(received)) == received


def test_a_timeout_is_never_rounded_down_to_the_default() -> None:
    wire = request_to_wire(an_open(timeout_s=0.0001))
    assert wire.open.timeout_ms == 1


@pytest.mark.parametrize("wire", [exchange_pb2.HandoffRequest(), exchange_pb2.HandoffRequest(open=exchange_pb2.Open())])
def test_a_request_that_says_nothing_is_refused(wire: exchange_pb2.HandoffRequest) -> None:
    with pytest.raises(ValueError, match=r"empty|no source"):
        request_from_wire(wire)


def test_a_response_that_says_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        response_from_wire(exchange_pb2.HandoffResponse())


def test_half_a_block_hash_is_refused() -> None:
    wire = exchange_pb2.HandoffRequest(open=exchange_pb2.Open(cached=exchange_pb2.CachedSource(block_hashes=b"x" * 17)))
    with pytest.raises(ValueError, match="17 bytes are not a whole number of 16-byte block hashes"):
        request_from_wire(wire)


def test_a_prefill_of_no_tokens_is_refused() -> None:
    wire = request_to_wire(an_open(prefill(0)))
    with pytest.raises(ValueError, match="a prefill of no tokens"):
        request_from_wire(wire)


@pytest.mark.parametrize("field", ["temperature", "top_p", "repetition_penalty", "max_tokens", "seed"])
def test_a_sampling_parameter_that_a_gateway_did_not_resolve_is_named(field: str) -> None:
    wire = sampling_params_to_wire(SamplingParams(max_tokens=1))
    wire.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"sampling_params.{field} is absent"):
        sampling_params_from_wire(wire)


def test_a_sampling_parameter_out_of_its_range_is_refused_like_anywhere_else() -> None:
    wire = sampling_params_to_wire(SamplingParams(max_tokens=1))
    wire.top_p = 2.0
    with pytest.raises(ValueError, match="top_p must be in"):
        sampling_params_from_wire(wire)


def test_more_than_one_choice_is_not_a_workers_business() -> None:
    wire = sampling_params_to_wire(SamplingParams(max_tokens=1))
    wire.n = 2
    with pytest.raises(ValueError, match="n must be 1 towards a worker, not 2"):
        sampling_params_from_wire(wire)


def test_logprobs_that_do_not_pair_up_are_refused() -> None:
    logprobs = sampling_pb2.TokenLogprobs(logprob=-1.0, top_token_ids=[1, 2], top_logprobs=[-1.0])
    complete = exchange_pb2.Complete(first_tokens=[exchange_pb2.SampledToken(token_id=1, logprobs=logprobs)])
    with pytest.raises(ValueError, match="shorter"):
        response_from_wire(exchange_pb2.HandoffResponse(complete=complete))


@given(prompts, token_ids)
def test_a_prompts_log_probabilities_survive_the_wire(prompt: tuple[int, list[SampledToken]], first: int) -> None:
    num_top, tokens = prompt
    wire = prompt_logprobs_to_wire(tokens, num_top)
    whole = [first, *(token.token_id for token in tokens)]
    assert prompt_logprobs_from_wire(wire, whole) == tuple(tokens)
    with pytest.raises(ValueError, match=f"of {len(tokens)} tokens for a prompt of {len(whole) + 1}"):
        prompt_logprobs_from_wire(wire, [*whole, 1])


def test_best_tokens_of_a_prompt_are_as_many_as_the_vocabulary_has() -> None:
    wire = prompt_logprobs_to_wire([SampledToken(1, -0.5, ((1, -0.5), (0, -1.5)))], 20)
    assert wire.num_top == 2
    assert prompt_logprobs_from_wire(wire, [0, 1]) == (SampledToken(1, -0.5, ((1, -0.5), (0, -1.5))),)


@pytest.mark.parametrize("field", ["top_token_ids", "top_logprobs"])
def test_log_probabilities_of_a_prompt_that_do_not_pair_up_are_refused(field: str) -> None:
    wire = prompt_logprobs_to_wire([SampledToken(1, -0.5, ((1, -0.5),))] * 3, 1)
    getattr(wire, field).append(1)
    with pytest.raises(ValueError, match="not 1 for each of 3 tokens"):
        prompt_logprobs_from_wire(wire, [1, 1, 1, 1])

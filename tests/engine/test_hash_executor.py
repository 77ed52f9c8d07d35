"""The hash executor shows what it must: whatever is wrong with a request's blocks changes its next token."""

import numpy as np
import pytest

from engine.executor import SamplingInput, ScheduledRequest, SchedulerOutput
from engine.hash_executor import SLOT_SIZE, HashExecutor, expected_prompt_logprobs, expected_tokens, next_token
from engine.memory import PrivateMemory
from engine.sampling_params import SamplingParams

VOCAB_SIZE = 2**31 - 1  # so large that two texts never agree by chance
BLOCK_SIZE = 4
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
TOKENS = tuple(range(100, 110))
TABLE = (7, 3, 5)


def make_executor():
    executor = HashExecutor(vocab_size=VOCAB_SIZE, block_size=BLOCK_SIZE)
    memory = PrivateMemory(9 * BLOCK_SIZE * SLOT_SIZE)
    executor.bind(memory, 9)
    return executor, memory


def run(executor, tokens=TOKENS, num_computed=0, table=TABLE, params=GREEDY, name="a"):
    sampling = SamplingInput(params, tokens, [])
    request = ScheduledRequest(name, tokens[num_computed:], num_computed, (table,), sampling)
    return executor.execute(SchedulerOutput((request,))).sampled[name]


RIGHT = next_token(TOKENS, GREEDY, VOCAB_SIZE).token_id


def test_token_equals_the_oracle_when_computed_at_once_or_after_a_prefix():
    executor, _ = make_executor()
    assert run(executor).token_id == RIGHT
    for num_computed in range(len(TOKENS)):
        assert run(executor, num_computed=num_computed).token_id == RIGHT


@pytest.mark.parametrize("table", [(7, 3, 6), (3, 7, 5), (7, 7, 5), (0, 3, 5), (7, 0, 5), (8, 3, 5)])
def test_token_changes_when_the_block_table_is_wrong(table):
    executor, _ = make_executor()
    run(executor)
    assert run(executor, num_computed=9, table=table).token_id != RIGHT


@pytest.mark.parametrize("byte", [7 * 32, 7 * 32 + 4, 3 * 32 + 31, 5 * 32])
def test_token_changes_when_a_byte_of_its_blocks_does(byte):
    executor, memory = make_executor()
    run(executor)
    memory.buffer[byte] ^= 1
    assert run(executor, num_computed=9).token_id != RIGHT


def test_token_stays_when_a_byte_beyond_its_blocks_changes():
    executor, memory = make_executor()
    run(executor)
    for byte in (6 * 32, 5 * 32 + 2 * SLOT_SIZE):  # another block; a slot after the last token
        memory.buffer[byte] ^= 1
    assert run(executor, num_computed=9).token_id == RIGHT


def test_token_changes_when_a_block_is_stale():
    executor, memory = make_executor()
    stale = bytes(memory.buffer)
    run(executor)
    memory.buffer[3 * 32 : 4 * 32] = stale[3 * 32 : 4 * 32]
    assert run(executor, num_computed=9).token_id != RIGHT


def test_token_changes_when_another_request_of_the_batch_writes_into_its_block():
    executor, _ = make_executor()
    run(executor)
    victim = ScheduledRequest("a", TOKENS[9:], 9, (TABLE,), SamplingInput(GREEDY, TOKENS, []))
    thief = ScheduledRequest("b", (1, 2), 0, ((3,),), SamplingInput(GREEDY, (1, 2), []))
    assert executor.execute(SchedulerOutput((victim, thief))).sampled["a"].token_id != RIGHT


def test_token_is_right_when_the_blocks_bytes_moved_to_another_pool():
    executor, memory = make_executor()
    run(executor)
    other, other_memory = make_executor()
    for here, there in zip(TABLE, (1, 2, 8), strict=True):
        other_memory.buffer[there * 32 : there * 32 + 32] = memory.buffer[here * 32 : here * 32 + 32]
    assert run(other, num_computed=9, table=(1, 2, 8)).token_id == RIGHT


def test_seed_counts_only_when_sampled():
    executor, _ = make_executor()
    greedy = {run(executor, params=SamplingParams(8, temperature=0.0, seed=seed)).token_id for seed in range(4)}
    sampled = {run(executor, params=SamplingParams(8, temperature=1.0, seed=seed)).token_id for seed in range(-2, 2)}
    assert greedy == {RIGHT}
    assert len(sampled) == 4


def test_nothing_is_sampled_when_a_chunk_does_not_end_the_prompt():
    executor, _ = make_executor()
    request = ScheduledRequest("a", TOKENS[:4], 0, (TABLE,), None)
    assert executor.execute(SchedulerOutput((request,))).sampled == {}


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_are_ordered_and_begin_with_the_token_when_asked_for(count):
    executor, _ = make_executor()
    params = SamplingParams(8, temperature=0.0, logprobs=count)
    token = run(executor, params=params)
    assert token == next_token(TOKENS, params, VOCAB_SIZE)
    assert token.logprob is not None
    assert token.logprob < 0
    assert len(token.top) == count
    assert [logprob for _, logprob in token.top] == sorted((logprob for _, logprob in token.top), reverse=True)
    assert token.top[:1] in ((), ((token.token_id, token.logprob),))


def test_no_logprobs_are_given_when_not_asked_for():
    executor, _ = make_executor()
    assert run(executor).logprob is None
    assert run(executor).top == ()


def test_expected_output_ends_at_stop_token_max_tokens_or_context():
    whole = expected_tokens([1, 2, 3], GREEDY, 50)
    assert len(whole) == 8
    assert expected_tokens([1, 2, 3], GREEDY, 50, max_model_len=6) == whole[:3]
    stop = SamplingParams(8, temperature=0.0, stop_token_ids=(whole[4],))
    assert expected_tokens([1, 2, 3], stop, 50) == whole[: whole.index(whole[4]) + 1]


def test_every_group_is_written_and_read_when_there_are_two():
    executor, memory = make_executor()
    request = ScheduledRequest("a", TOKENS, 0, (TABLE, (1, 2, 4)), SamplingInput(GREEDY, TOKENS, []))
    right = next_token(TOKENS, GREEDY, VOCAB_SIZE, num_groups=2).token_id
    assert executor.execute(SchedulerOutput((request,))).sampled["a"].token_id == right
    memory.buffer[2 * 32] ^= 1
    last = ScheduledRequest("a", TOKENS[9:], 9, (TABLE, (1, 2, 4)), SamplingInput(GREEDY, TOKENS, []))
    assert executor.execute(SchedulerOutput((last,))).sampled["a"].token_id != right


# --- forks and copies


def test_forks_are_sampled_from_the_prompts_slots_each_by_its_seed():
    executor, _ = make_executor()
    params = [SamplingParams(8, seed=seed) for seed in range(3)]
    forks = [(f"f{seed}", SamplingInput(of, TOKENS, [])) for seed, of in enumerate(params)]
    prompt = ScheduledRequest("a", TOKENS, 0, (TABLE,), None, forks=forks)
    sampled = executor.execute(SchedulerOutput((prompt,))).sampled
    assert sampled == {f"f{seed}": next_token(TOKENS, of, VOCAB_SIZE) for seed, of in enumerate(params)}


def test_blocks_are_copied_in_order_before_anything_is_written():
    executor, _ = make_executor()
    run(executor, tokens=TOKENS[:9])
    last = ScheduledRequest("a", TOKENS[9:], 9, ((7, 3, 4),), SamplingInput(GREEDY, TOKENS, []))
    in_place = ScheduledRequest("b", (1, 2, 3), 9, (TABLE,), None)
    copies = ((5, 6), (6, 4), (1, 6))
    assert executor.execute(SchedulerOutput((last, in_place), copies)).sampled["a"].token_id == RIGHT
    assert run(executor, num_computed=9, table=(7, 3, 6)).token_id != RIGHT


# --- structure


class OddTokens:
    """Allows odd tokens, and after one of them only what it is told."""

    has_given_up = False

    def __init__(self, vocab_size, then):
        self.vocab_size, self.then = vocab_size, then

    def allowed(self, output_token_ids):
        ids = np.arange(self.vocab_size) % 2 == 1
        if output_token_ids:
            ids = np.isin(np.arange(self.vocab_size), self.then)
        bits = np.packbits(ids, bitorder="little")
        return np.pad(bits, (0, -len(bits) % 4)).view(np.uint32)


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 97])
def test_only_what_the_matcher_allows_is_sampled_and_logprobs_stay_the_raw_ones(vocab_size):
    executor = HashExecutor(vocab_size=vocab_size, block_size=BLOCK_SIZE)
    executor.bind(PrivateMemory(9 * BLOCK_SIZE * SLOT_SIZE), 9)
    for length in range(1, 11):
        tokens = tuple(token % vocab_size for token in TOKENS[:length])
        params = SamplingParams(8, temperature=0.0, logprobs=vocab_size)
        matcher = OddTokens(vocab_size, (4, 7))
        for output, allowed in (([], range(1, vocab_size, 2)), ([3], (4, 7))):
            sampling = SamplingInput(params, tokens, output, matcher)
            share = ScheduledRequest("a", tokens, 0, (TABLE,), sampling)
            token = executor.execute(SchedulerOutput((share,))).sampled["a"]
            assert token.token_id in allowed
            free = next_token(tokens, params, vocab_size)
            assert token.top == free.top
            assert token.logprob == dict(free.top)[token.token_id]


def test_oracle_follows_the_matcher_too():
    matcher = OddTokens(97, (6,))
    whole = expected_tokens(TOKENS[:3], SamplingParams(4, temperature=0.0), 97, matcher=matcher)
    assert whole[0] % 2 == 1
    assert whole[1:] == [6, 6, 6]


# --- log-probabilities of a prompt


def prompt_logprobs(executor, first=0, end=10):
    targets = TOKENS[first + 1 : end + 1]
    share = ScheduledRequest("a", TOKENS[first:end], first, (TABLE,), None, prompt_targets=targets, num_prompt_top=2)
    return executor.execute(SchedulerOutput((share,))).prompt_logprobs["a"]


WANTED = SamplingParams(8, prompt_logprobs=2)


def test_prompt_logprobs_equal_the_oracle_at_once_or_in_chunks():
    executor, _ = make_executor()
    right = expected_prompt_logprobs(TOKENS, WANTED, VOCAB_SIZE)
    assert tuple(prompt_logprobs(executor)) == right
    for cut in range(1, 9):
        executor, _ = make_executor()
        assert (*prompt_logprobs(executor, 0, cut), *prompt_logprobs(executor, cut)) == right
    assert [token.token_id for token in right] == list(TOKENS[1:])
    assert expected_prompt_logprobs(TOKENS, GREEDY, VOCAB_SIZE) is None


def test_prompt_logprobs_change_from_a_wrong_slot_on():
    executor, memory = make_executor()
    right = prompt_logprobs(executor)
    memory.buffer[3 * 32 + 8] ^= 1  # position 5
    found = prompt_logprobs(executor, 6)
    assert all(ours != theirs for ours, theirs in zip(found, right[6:], strict=True))
    assert prompt_logprobs(executor, 0, 5) == right[:5]


def test_a_token_of_the_prompt_that_is_among_the_best_has_its_logprob():
    right = expected_prompt_logprobs(TOKENS, SamplingParams(8, prompt_logprobs=150), 150)
    assert all(dict(token.top)[token.token_id] == token.logprob for token in right)

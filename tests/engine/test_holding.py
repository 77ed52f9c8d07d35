"""What peers hold of a pool: blocks of prefill_only requests as they fill, and cached prefixes."""

from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.hash_executor import HashExecutor, expected_tokens
from engine.kvcache.block_hash import hash_blocks, root_hash
from engine.kvcache.events import BlocksStored, CacheCleared
from engine.memory import PrivateMemory
from engine.sampling_params import FinishReason
from tests.engine.executors import VOCAB_SIZE
from tests.engine.harness import BLOCK_SIZE, Driver, check_idle, make_engine, make_request, prompt_of


def hashes_of(engine, tokens, salt=""):
    return hash_blocks(root_hash(engine.executor.layout.fingerprint, salt), tokens, BLOCK_SIZE)


def reports(driver):
    return [filled for result in driver.results for filled in result.filled]


def test_blocks_are_reported_full_as_chunks_end_and_in_part_with_the_first_token():
    driver = Driver(make_engine(max_num_batched_tokens=8, max_num_seqs=1))
    driver.add(make_request("a", prompt_of(22), prefill_only=True))
    driver.run()
    assert [(f.group, f.first, len(f.block_ids), f.num_tokens) for f in reports(driver)] == [
        (0, 0, 2, 8),
        (0, 2, 2, 16),
        (0, 4, 2, 22),
    ]
    assert len(driver.tokens("a")) == 1
    assert driver.finish_reason("a") is FinishReason.LENGTH
    assert driver.engine.stats().num_pins == 6
    for filled in reports(driver):
        driver.engine.unpin(filled.block_ids)
    check_idle(driver.engine)


def test_chunk_that_fills_no_block_is_not_reported():
    driver = Driver(make_engine(max_num_batched_tokens=3, max_num_seqs=1))
    driver.add(make_request("a", prompt_of(7), prefill_only=True))
    driver.run()
    assert [(f.first, len(f.block_ids), f.num_tokens) for f in reports(driver)] == [(0, 1, 4), (1, 1, 7)]


def test_cached_blocks_are_reported_too_when_the_prompt_begins_with_them():
    driver = Driver(make_engine())
    driver.add(make_request("a", prompt_of(9)))
    driver.run()
    driver.add(make_request("b", prompt_of(11), prefill_only=True))
    driver.run()
    assert [(f.first, len(f.block_ids), f.num_tokens) for f in reports(driver)] == [(0, 3, 11)]
    assert driver.outputs["b"][0].num_cached_tokens == 8


def test_first_token_is_that_of_a_whole_run_when_request_is_prefilled_only():
    driver = Driver(make_engine())
    driver.add(make_request("whole", prompt_of(9)), make_request("apart", prompt_of(9), prefill_only=True))
    driver.run()
    assert driver.tokens("apart") == driver.tokens("whole")[:1]


def test_request_ends_with_stop_when_its_first_token_is_one():
    driver = Driver(make_engine())
    driver.add(make_request("a", prompt_of(9)))
    (first, *_) = driver.run().tokens("a")
    driver.add(make_request("b", prompt_of(9), prefill_only=True, stop_token_ids=(first,)))
    assert driver.run().finish_reason("b") is FinishReason.STOP


def test_pins_outlive_an_abort_and_are_given_back_by_unpin():
    driver = Driver(make_engine(max_num_batched_tokens=8, max_num_seqs=1))
    driver.add(make_request("a", prompt_of(22), prefill_only=True))
    (filled,) = driver.step().filled
    assert driver.engine.abort("a")
    driver.engine.check_integrity()
    assert driver.engine.stats().num_active_blocks == 2
    driver.engine.unpin(filled.block_ids)
    check_idle(driver.engine)


def test_pinned_blocks_keep_their_content_when_the_pool_is_flooded():
    driver = Driver(make_engine(num_blocks=12))
    driver.add(make_request("a", prompt_of(10), prefill_only=True))
    (filled,) = driver.run().results[0].filled
    memory = driver.engine.executor._pool
    before = memory[list(filled.block_ids)].copy()
    driver.add(*(make_request(f"r{i}", prompt_of(20, i + 1), max_tokens=9) for i in range(5)))
    driver.run()
    assert (memory[list(filled.block_ids)] == before).all()
    driver.engine.unpin(filled.block_ids)
    check_idle(driver.engine)


def test_blocks_are_reported_once_when_a_prefill_only_request_is_preempted():
    driver = Driver(make_engine(num_blocks=11, max_num_batched_tokens=3, max_num_seqs=2, expected_growth_tokens=0))
    driver.add(make_request("decode", prompt_of(4, 1), max_tokens=14))
    driver.step()
    driver.add(make_request("prefill", prompt_of(26), prefill_only=True))
    driver.run()
    assert driver.preempted == ["prefill"]
    assert [f.first for f in reports(driver)] == sorted({f.first for f in reports(driver)})
    assert sum(len(f.block_ids) for f in reports(driver)) == 7
    for filled in reports(driver):
        driver.engine.unpin(filled.block_ids)
    check_idle(driver.engine)


def test_longest_cached_run_is_pinned_when_asked_by_hashes():
    driver = Driver(make_engine())
    driver.add(make_request("a", prompt_of(13)))
    driver.run()
    engine = driver.engine
    assert engine.pin_cached(hashes_of(engine, prompt_of(13), "other tenant")) == []
    pinned = engine.pin_cached([*hashes_of(engine, prompt_of(12)), *hashes_of(engine, prompt_of(4, 1))])
    assert len(pinned) == 3
    again = engine.pin_cached(hashes_of(engine, prompt_of(8)))
    assert again == pinned[:2]
    engine.check_integrity()
    for block_id in pinned:  # head first, as confirmations come
        engine.unpin([block_id])
    engine.unpin(again)
    check_idle(engine)


def test_unpin_is_refused_when_nothing_is_pinned():
    engine = make_engine()
    with pytest.raises(ValueError, match="pinned 0 times"):
        engine.unpin([1])


def test_clearing_tells_what_stays_when_some_is_pinned():
    driver = Driver(make_engine())
    driver.add(make_request("a", prompt_of(9)), make_request("b", prompt_of(9, 1)))
    driver.run()
    engine = driver.engine
    kept = hashes_of(engine, prompt_of(9))
    pinned = engine.pin_cached(kept)
    engine.clear_cache()
    assert engine.has_work  # events to be told
    assert driver.step().kv_events == (CacheCleared(), BlocksStored(tuple(kept)))
    assert engine.cached_hashes() == kept
    assert not engine.has_work
    engine.unpin(pinned)
    check_idle(engine)
    assert engine.stats().num_cached_blocks == 2


def test_pulled_prefix_is_handed_on_with_a_first_token_for_every_fork():
    driver = Driver(make_engine())
    options = {"prefill_only": True, "temperature": 1.0}
    prompt = make_request("a", prompt_of(11), receives_kv=True, **options)
    forks = [make_request(f"a.{seed}", prompt_of(11), seed=seed, **options) for seed in range(3)]
    driver.add_choices(prompt, forks)
    (target,) = driver.step().received_targets
    for position, token in enumerate(prompt_of(8)):
        (table,) = target.block_tables
        driver.engine.executor._pool[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = (
            (position + 1) << 32
        ) | token
    driver.engine.commit_blocks("a", 2)
    with pytest.raises(ValueError, match="prefilled here"):
        driver.engine.finish_receiving("a", 11, None, {"a.0": 1, "a.1": 1, "a.2": 1})
    driver.engine.finish_receiving("a", 8, None)
    (filled,) = driver.step().filled
    assert (filled.request_id, filled.block_ids, filled.num_tokens) == ("a", target.block_tables[0], 11)
    for fork in forks:
        assert driver.tokens(fork.request_id) == expected_tokens(prompt_of(11), fork.params, VOCAB_SIZE)[:1]
    driver.engine.unpin(filled.block_ids)
    check_idle(driver.engine)


class LateExecutor(HashExecutor):
    """Like a GPU: a step that samples nothing is only given to it, and has a mark to wait for."""

    def execute(self, step):
        output = super().execute(step)
        self.num_fences = getattr(self, "num_fences", 0) + (not output.sampled)
        return output if output.sampled else replace(output, fence=self.num_fences)


def test_blocks_of_a_step_that_may_still_run_are_reported_with_what_to_wait_for():
    executor = LateExecutor(vocab_size=97, block_size=BLOCK_SIZE)
    config = EngineConfig(
        num_blocks=32, max_model_len=64, block_size=BLOCK_SIZE, max_num_seqs=1, max_num_batched_tokens=8
    )
    driver = Driver(Engine(config, executor, PrivateMemory(32 * executor.layout.bytes_per_block)))
    driver.add(make_request("a", prompt_of(22), prefill_only=True))
    driver.step()
    assert [(result.fence, len(result.filled)) for result in driver.results] == [(1, 1)]
    pinned = driver.engine.pin_cached(hashes_of(driver.engine, prompt_of(8)))
    assert (len(pinned), driver.engine.fence) == (2, 1), "who is lent a cached block waits for the step that filled it"
    driver.run()
    assert [(result.fence, len(result.filled)) for result in driver.results if result.filled] == [
        (1, 1),
        (2, 1),
        (None, 1),
    ]
    assert driver.engine.fence is None, "the last step gave a token, so all before it is done"

"""Two engines hand KV over in any order of events, under faults: every output is right, both pools are whole again.

The machine plays worker and wire: it copies blocks between the engines' memories, confirms, loses the holder, aborts.
Data that was never confirmed is overwritten with garbage before it is given up, so that reading it would show.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.hash_executor import expected_prompt_logprobs, expected_tokens
from engine.kvcache.block_hash import hash_blocks, root_hash
from engine.kvcache.events import BlocksRemoved, BlocksStored
from engine.request import Request
from tests.engine.executors import VOCAB_SIZE
from tests.engine.harness import BLOCK_SIZE, Driver, check_idle, make_engine, make_request

MAX_MODEL_LEN = 24


@dataclass
class Handoff:
    request: Request
    forks: list[Request] = field(default_factory=list)  # of a prompt
    target: tuple[int, ...] | None = None  # the consumer's blocks
    is_open: bool = False
    ready: list[int] = field(default_factory=list)  # the holder's blocks so far, all once pinned
    num_copied: int = 0
    num_confirmed: int = 0
    first_tokens: dict[str, int] = field(default_factory=dict)  # of the request, or of its forks

    @property
    def is_complete(self) -> bool:
        return bool(self.first_tokens) and self.num_confirmed == len(self.target)


class Peer(Driver):
    """A driver with a directory of what its engine says that it caches."""

    def __init__(self, engine):
        super().__init__(engine)
        self.directory = set()

    def step(self):
        result = super().step()
        for event in result.kv_events:
            if isinstance(event, BlocksStored):
                self.directory.update(event.block_hashes)
            elif isinstance(event, BlocksRemoved):
                self.directory.difference_update(event.block_hashes)
            else:
                self.directory.clear()
        if not self.engine._pool.has_events:
            assert self.directory == set(self.engine.cached_hashes())
        return result


class TwoEngines(RuleBasedStateMachine):
    @initialize(holder_blocks=st.integers(6, 9), consumer_blocks=st.integers(6, 9), growth=st.integers(0, 6))
    def start(self, holder_blocks, consumer_blocks, growth):
        common = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 3, "max_num_batched_tokens": 7}
        self.holder = Peer(make_engine(num_blocks=holder_blocks + 1, expected_growth_tokens=growth, **common))
        self.consumer = Peer(make_engine(num_blocks=consumer_blocks + 1, expected_growth_tokens=growth, **common))
        self.requests = {}  # by name: all sequences ever sent to the consumer
        self.forks_left = {}  # by a prompt's name: names of those that nobody aborted
        self.told = set()  # whose prompt's log-probabilities came
        self.handoffs = {}  # by name: those that still receive
        self.delivered = {}  # by name: tokens, from whichever engine
        self.aborted = set()
        self.num_submitted = 0
        self.pins = []  # prefixes of the holder that somebody else holds

    # --- the client

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_tokens=st.integers(1, 10),
        seed=st.integers(0, 1),
        num_resumed=st.integers(0, 3),
        apart=st.booleans(),
        num_forks=st.sampled_from([0, 0, 1, 2, 3]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
    )
    def submit(self, prompt, max_tokens, seed, num_resumed, apart, num_forks, prompt_logprobs):
        name = f"r{self.num_submitted}"
        self.num_submitted += 1
        options = {"max_tokens": max_tokens, "temperature": float(seed), "prompt_logprobs": prompt_logprobs}
        whole = self.expected(make_request(name, prompt, seed=seed, **options))
        resumed = whole[: min(num_resumed, len(whole) - 1)] if num_forks == 0 else []
        request = make_request(name, prompt, seed=seed, resume_token_ids=resumed, receives_kv=apart, **options)
        forks = [make_request(f"{name}.{index}", prompt, seed=index, **options) for index in range(num_forks)]
        for sequence in forks or (request,):
            self.requests[sequence.request_id] = sequence
            self.delivered[sequence.request_id] = list(resumed)
        if forks:
            self.forks_left[name] = {fork.request_id for fork in forks}
        self.consumer.add_choices(request, forks)
        if apart:
            self.handoffs[name] = Handoff(request, forks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.aborted.add(name)
        self.consumer.engine.abort(name)
        of = name.split(".")[0]
        if of in self.forks_left:
            self.forks_left[of].discard(name)
            if self.forks_left[of]:
                return
            self.consumer.engine.abort(of)
        if of in self.handoffs:
            self.let_go(self.handoffs.pop(of))

    # --- the wire

    @rule()
    def step_consumer(self):
        result = self.consumer.step()
        for target in result.received_targets:
            self.handoffs[target.request_id].target = target.block_tables[0]
        for output in result.outputs:
            self.deliver(output)

    @rule()
    def step_holder(self):
        result = self.holder.step()
        for filled in result.filled:
            handoff = self.handoffs[filled.request_id]
            assert filled.first == len(handoff.ready)
            handoff.ready += filled.block_ids
        for output in result.outputs:
            self.handoffs[output.request_id.split(".")[0]].first_tokens[output.request_id] = output.token.token_id
            self.deliver(output)

    def deliver(self, output):
        name = output.request_id
        self.delivered[name].append(output.token.token_id)
        request = self.requests[name]
        if output.prompt_logprobs is not None:
            assert name not in self.told
            self.told.add(name)
            assert output.prompt_logprobs == expected_prompt_logprobs(
                request.prompt_token_ids, request.params, VOCAB_SIZE
            )

    def choose(self, data, condition):
        names = [name for name, handoff in self.handoffs.items() if condition(handoff)]
        return data.draw(st.sampled_from(names)) if names else None

    @rule(data=st.data())
    def open(self, data):
        name = self.choose(data, lambda h: h.target is not None and not h.is_open)
        if name is not None:
            self.open_handoff(self.handoffs[name])

    @rule(data=st.data())
    def copy(self, data):
        name = self.choose(data, lambda h: h.num_copied < len(h.ready))
        if name is not None:
            handoff = self.handoffs[name]
            self.copy_until(handoff, data.draw(st.integers(handoff.num_copied + 1, len(handoff.ready))))

    @rule(data=st.data())
    def confirm(self, data):
        name = self.choose(data, lambda h: h.num_confirmed < h.num_copied)
        if name is not None:
            self.confirm_copied(self.handoffs[name])

    @rule(data=st.data())
    def finish(self, data):
        name = self.choose(data, lambda h: h.target is not None and h.is_complete)
        if name is not None:
            self.finish_handoff(name)

    @rule(data=st.data())
    def lose_holder(self, data):
        name = self.choose(data, lambda h: h.target is not None)
        if name is not None:
            handoff = self.handoffs.pop(name)
            self.let_go(handoff)
            skip = self.consumer.engine._manager.num_registered_blocks(name)
            garbage = list(handoff.target[max(handoff.num_confirmed, skip) :])
            self.consumer.engine.executor._pool[garbage] = -1
            num_tokens = min(handoff.num_confirmed * BLOCK_SIZE, handoff.request.num_tokens)
            self.finish_receiving(handoff, num_tokens)

    # --- others

    @rule(prompt=st.lists(st.integers(0, 1), min_size=8, max_size=14))
    def pin_prefix(self, prompt):
        engine = self.holder.engine
        self.pins.append(engine.pin_cached(hash_blocks(root_hash(engine.executor.layout.fingerprint), prompt, 4)))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin_some(self, data):
        pins = self.pins[data.draw(st.integers(0, len(self.pins) - 1))]
        count = data.draw(st.integers(0, len(pins)))
        self.holder.engine.unpin(pins[:count])  # head first
        del pins[:count]

    @rule(which=st.sampled_from(["holder", "consumer"]))
    def clear(self, which):
        getattr(self, which).engine.clear_cache()

    # --- what the wire does

    def open_handoff(self, handoff):
        request = handoff.request
        handoff.is_open = True
        prefill, *forks = (
            Request(
                each.request_id,
                each.prompt_token_ids,
                each.params,
                arrival_time=0.0,
                resume_token_ids=each.output_token_ids,
                prefill_only=True,
            )
            for each in (request, *handoff.forks)
        )
        self.holder.add_choices(prefill, forks)

    def copy_until(self, handoff, end):
        source, target = self.holder.engine.executor._pool, self.consumer.engine.executor._pool
        skip = self.consumer.engine._manager.num_registered_blocks(handoff.request.request_id)
        for index in range(max(handoff.num_copied, skip), end):
            target[handoff.target[index]] = source[handoff.ready[index]]
        handoff.num_copied = end

    def confirm_copied(self, handoff):
        self.holder.engine.unpin(handoff.ready[handoff.num_confirmed : handoff.num_copied])
        handoff.num_confirmed = handoff.num_copied
        self.consumer.engine.commit_blocks(handoff.request.request_id, handoff.num_confirmed)

    def finish_handoff(self, name):
        handoff = self.handoffs.pop(name)
        self.finish_receiving(handoff, handoff.request.num_tokens)

    def finish_receiving(self, handoff, num_tokens):
        name, tokens = handoff.request.request_id, handoff.first_tokens
        finish = self.consumer.engine.finish_receiving
        if handoff.forks:
            assert finish(name, num_tokens, None, tokens or None) is None  # with those of aborted ones
        else:
            finish(name, num_tokens, tokens.get(name))

    def let_go(self, handoff):
        self.holder.engine.abort(handoff.request.request_id)
        self.holder.engine.unpin(handoff.ready[handoff.num_confirmed :])

    def expected(self, request):
        return expected_tokens(request.prompt_token_ids, request.params, VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)

    # --- what always holds

    @invariant()
    def both_are_whole(self):
        self.holder.engine.check_integrity()
        self.consumer.engine.check_integrity()

    @invariant()
    def no_token_is_wrong(self):
        for name, tokens in self.delivered.items():
            assert tokens == self.expected(self.requests[name])[: len(tokens)]

    def teardown(self):
        if not hasattr(self, "holder"):
            return
        for pins in self.pins:
            self.holder.engine.unpin(pins)
        for _ in range(1000):
            if not (self.handoffs or self.holder.engine.has_work or self.consumer.engine.has_work):
                break
            self.step_consumer()
            self.step_holder()
            for name, handoff in list(self.handoffs.items()):
                if handoff.target is None:
                    continue
                if not handoff.is_open:
                    self.open_handoff(handoff)
                self.copy_until(handoff, len(handoff.ready))
                self.confirm_copied(handoff)
                if handoff.is_complete:
                    self.finish_handoff(name)
            self.both_are_whole()
        for name, request in self.requests.items():
            if name not in self.aborted:
                assert self.delivered[name] == self.expected(request)
                assert (name in self.told) == (request.params.prompt_logprobs is not None)
        check_idle(self.holder.engine)
        check_idle(self.consumer.engine)


TestTwoEngines = TwoEngines.TestCase
TestTwoEngines.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)

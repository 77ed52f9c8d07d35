"""Requests running through a memory in virtual time, more of them than fit: who holds what, step by step.

All requests are waiting when it begins. A step:

1. every running request gets a slot for the token that it has sampled last, oldest first; where there is none, the
   newest request is preempted: it gives all back, waits at the front, and is computed again;
2. waiting requests are admitted in order, until one does not fit (none in a step that preempts);
3. time passes, by the `StepTime`; every running request has one token more, and those that are complete leave.

What is measured are means over time under load: from when twice as many requests have left as ever ran at once, so that
the memory is full and its requests of all ages, until none waits any more.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.paging.kv_memory import KVMemory
from benchmarks.paging.lengths import Lengths


@dataclass(frozen=True, slots=True)
class StepTime:
    """A model of a step's duration, in seconds: what is the same for every step, and what grows with it."""

    fixed: float  # reading the weights
    per_token: float  # arithmetic of one token computed in it, of a prompt or a decode
    per_context_token: float  # reading the KV of one token that is held

    def of(self, num_computed: int, num_held: int) -> float:
        return self.fixed + self.per_token * num_computed + self.per_context_token * num_held


# OPT-13B on an A100 as in the paper's figure 12: 26 GB of weights and 0.8 MB of KV a token at 1.55 TB/s, 26 GFLOP a
# token at half of 312 TFLOP/s.
A100_OPT_13B = StepTime(fixed=17e-3, per_token=0.17e-3, per_context_token=0.5e-6)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Means over time under load. The four shares of the memory are 1 in sum."""

    tokens: float  # share that holds tokens
    promised: float  # share granted for tokens that will come
    unused: float  # share granted that its request never fills
    free: float  # share that nobody has
    num_running: float
    output_tokens_per_s: float  # of virtual time
    preemptions_per_request: float
    duration_s: float  # under load, virtual


@dataclass(frozen=True, slots=True)
class Place:
    """What one request has of the memory, in slots."""

    num_tokens: int  # that it holds now
    num_final_tokens: int  # that it will hold in the end
    num_granted: int


class OccupancyMeter:
    """Adds up steps. Means are weighted with the steps' durations."""

    def __init__(self, num_slots: int, step_time: StepTime) -> None:
        self._num_slots = num_slots
        self._step_time = step_time
        self._duration = self._tokens = self._promised = self._granted = self._running = 0.0
        self._num_output_tokens = 0

    def add(self, places: Sequence[Place], *, num_computed: int, num_sampled: int) -> None:
        """One step.

        Args:
            places: of all running requests, as they are after it.
            num_computed: tokens that it computes.
            num_sampled: tokens that it generates.
        """
        num_tokens = sum(place.num_tokens for place in places)
        duration_s = self._step_time.of(num_computed, num_tokens)
        granted = sum(place.num_granted for place in places)
        assert granted <= self._num_slots, f"{granted} slots granted of {self._num_slots}"
        self._duration += duration_s
        self._tokens += duration_s * num_tokens
        self._promised += duration_s * sum(
            min(place.num_granted, place.num_final_tokens) - place.num_tokens for place in places
        )
        self._granted += duration_s * granted
        self._running += duration_s * len(places)
        self._num_output_tokens += num_sampled

    def mean(self, preemptions_per_request: float) -> Occupancy:
        """
        Raises:
            ValueError: nothing was added.
        """
        if not self._duration:
            raise ValueError("the memory was never under load for long enough: give more requests, or less memory")
        whole = self._duration * self._num_slots
        return Occupancy(
            tokens=self._tokens / whole,
            promised=self._promised / whole,
            unused=(self._granted - self._tokens - self._promised) / whole,
            free=1 - self._granted / whole,
            num_running=self._running / self._duration,
            output_tokens_per_s=self._num_output_tokens / self._duration,
            preemptions_per_request=preemptions_per_request,
            duration_s=self._duration,
        )


class LoadWindow:
    """When load has lasted long enough to be measured; see the module's docstring."""

    def __init__(self) -> None:
        self.num_finished = 0
        self._most_running = 0

    def is_open(self, num_running: int, num_waiting: int) -> bool:
        """Asked once a step, after admission."""
        self._most_running = max(self._most_running, num_running)
        return num_waiting > 0 and self.num_finished >= 2 * self._most_running


@dataclass(slots=True)
class _Running:
    name: str
    lengths: Lengths
    num_generated: int = 0

    @property
    def num_tokens(self) -> int:
        return self.lengths.prompt + self.num_generated


def simulate(memory: KVMemory, requests: tuple[Lengths, ...], step_time: StepTime) -> Occupancy:
    """
    Raises:
        ValueError: a request does not fit even alone, or there are too few for a load.
    """
    waiting = deque(_Running(str(index), lengths) for index, lengths in enumerate(requests))
    running: list[_Running] = []  # oldest first
    meter, window = OccupancyMeter(memory.num_slots, step_time), LoadWindow()
    num_preemptions = 0
    while waiting or running:
        num_preempted = _grow(memory, running, waiting)
        num_preemptions += num_preempted
        num_computed = len(running)
        if not num_preempted:
            num_computed += _admit(memory, running, waiting)
        if not running:
            raise ValueError(f"{waiting[0].lengths} does not fit into {memory.num_slots} slots even alone")
        if window.is_open(len(running), len(waiting)):
            places = [_place(memory, request) for request in running]
            meter.add(places, num_computed=num_computed, num_sampled=len(running))
        for request in running:
            request.num_generated += 1
        finished = [request for request in running if request.num_generated == request.lengths.output]
        if finished:
            for request in finished:
                memory.release(request.name)
            window.num_finished += len(finished)
            running = [request for request in running if request.num_generated < request.lengths.output]
    return meter.mean(num_preemptions / len(requests))


def _grow(memory: KVMemory, running: list[_Running], waiting: deque[_Running]) -> int:
    """Makes room for every running request's last token; how many were preempted for it."""
    num_preempted = 0
    index = 0
    while index < len(running):  # preemption shortens the list at its end
        request = running[index]
        while not memory.grow(request.name, request.num_tokens):
            victim = running.pop()
            memory.release(victim.name)
            waiting.appendleft(victim)
            num_preempted += 1
            if victim is request:
                return num_preempted
        index += 1
    return num_preempted


def _admit(memory: KVMemory, running: list[_Running], waiting: deque[_Running]) -> int:
    """Takes in who fits, in order; the tokens that this step computes for them."""
    num_computed = 0
    while waiting and memory.admit(waiting[0].name, waiting[0].lengths, waiting[0].num_tokens):
        running.append(waiting.popleft())
        num_computed += running[-1].num_tokens
    return num_computed


def _place(memory: KVMemory, request: _Running) -> Place:
    # The very last token's KV is never computed.
    return Place(request.num_tokens, request.lengths.total - 1, memory.num_granted_slots(request.name))

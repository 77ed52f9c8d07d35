"""The order in which requests get blocks."""

from hypothesis import given
from hypothesis import strategies as st

from engine.waiting_queue import WaitingQueue
from tests.engine.harness import make_request

# (priority, had begun, arrival time)
waiting = st.tuples(st.integers(-1, 1), st.booleans(), st.integers(0, 3))


def queued(index, priority, had_begun, arrival_time):
    request = make_request(f"r{index}", [1] * (index + 1), priority=priority, arrival_time=float(arrival_time))
    request.order = (priority, float(arrival_time), index)
    request.first_scheduled_time = 9.0 if had_begun else None
    return request


def rank(request):
    return (request.priority, request.first_scheduled_time is None, request.arrival_time, request.order[2])


@given(st.lists(waiting, max_size=12), st.data())
def test_queue_equals_a_sorted_list_when_requests_come_and_go(entries, data):
    queue, model = WaitingQueue(), []
    for index, entry in enumerate(entries):
        request = queued(index, *entry)
        queue.push(request)
        model.append(request)
        if data.draw(st.booleans()):
            removed = data.draw(st.sampled_from(model))
            queue.remove(removed)
            model.remove(removed)
        model.sort(key=rank)
        assert list(queue) == model
        assert len(queue) == len(model)
        assert queue.num_tokens == sum(request.num_tokens for request in model)
        assert queue.peek() is (model[0] if model else None)
    assert [queue.pop() for _ in model] == model
    assert queue.num_tokens == 0
    assert queue.peek() is None


def test_request_that_had_begun_is_first_though_another_arrived_earlier():
    queue = WaitingQueue()
    queue.push(queued(0, 0, False, 0))
    begun = queued(1, 0, True, 5)
    queue.push(begun)
    assert queue.peek() is begun


def test_urgent_request_is_first_though_another_had_begun():
    queue = WaitingQueue()
    queue.push(queued(0, 0, True, 0))
    urgent = queued(1, -1, False, 5)
    queue.push(urgent)
    assert queue.peek() is urgent

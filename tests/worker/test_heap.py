"""What stays is not collected again."""

import gc
from collections.abc import Iterator

import pytest

from worker.heap import settle_heap


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_garbage_goes_and_what_is_left_is_not_looked_at_any_more() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    kept = [object()]
    del cycle
    settle_heap()
    assert gc.get_freeze_count() > 1000
    assert not any(kept is tracked for tracked in gc.get_objects())
    assert gc.collect() == 0

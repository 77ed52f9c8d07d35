"""Structures whose trials wait until a test lets them through."""

from collections.abc import AsyncIterator

import pytest

from structure_waiters import Gate
from worker.structures import Structures


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture
async def structures(gate: Gate) -> AsyncIterator[Structures]:
    structures = Structures(gate.new_compiler)
    yield structures
    gate.opened.set()
    structures.close()

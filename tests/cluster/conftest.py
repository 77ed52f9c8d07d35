"""What tests of the cluster share: one Ray for the whole session."""

import asyncio
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray of its own with logical CPUs for everybody; it takes seconds to start, so only where it is asked for."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from cluster import actors

    actors.connect("local", num_cpus=16)
    yield
    asyncio.run(actors.disconnect())

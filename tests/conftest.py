"""What all tests share: no network for model libraries, one thread for torch, the oracle."""

import os
from typing import TYPE_CHECKING

import pytest

# Before anything imports transformers: what a test does not find locally must fail, not be fetched.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Before anything imports triton: tests attend on the CPU, by its interpreter.
os.environ["TRITON_INTERPRET"] = "1"

if TYPE_CHECKING:
    from tests.oracle import Oracle


@pytest.fixture(scope="session")
def oracle() -> "Oracle":
    """transformers on the embedded model; loading takes seconds and half a gigabyte, so only where it is asked for."""
    import torch

    torch.set_num_threads(1)
    from tests.oracle import Oracle

    return Oracle()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What serves until the session ends is started last: tests before it count objects, mappings and descriptors."""
    items.sort(key=lambda item: item.path.parent.name == "e2e")

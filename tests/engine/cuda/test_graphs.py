"""Decode steps as graphs, with a capture that plays one: what replays is the captured call, on the same tensors."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from engine.attention.backend import AttentionMetadata, build_metadata
from engine.attention.reference import ReferenceBackend
from engine.cuda.graphs import DecodeGraphs, graph_sizes, padded
from engine.executor import ScheduledRequest
from tests.tiny_models import VOCAB_SIZE, PagedRunner, random_tokens, save_model

BLOCK_SIZE = 4


class ReplayingBackend(ReferenceBackend):
    """The reference, as a backend whose captured kernels read what was planned last."""

    can_replay = True

    def __init__(self) -> None:
        super().__init__()
        self.replayed: list[int] = []

    def plan(self, metadata: AttentionMetadata, *, replayed: bool = False) -> None:
        if replayed:
            assert metadata.num_decodes == metadata.num_requests, "only decodes are replayed"
            self.replayed.append(metadata.num_requests)
        super().plan(metadata)


def play(step: Callable[[], None]) -> Callable[[], None]:
    """A capture: does it once, and hands it out to be done again."""
    step()
    return step


class Runner(PagedRunner):
    """A tiny model whose decode steps can run as graphs."""

    def __init__(self, path: Path, max_batch: int) -> None:
        super().__init__(path, block_size=BLOCK_SIZE)
        self.backend = ReplayingBackend()
        self.backend.prepare(self.shape)
        self._attention = self.backend

        def forward(token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return self.model.forward(token_ids, positions, self.backend, self.layer_kvs, rows)

        with torch.inference_mode():
            self.graphs = DecodeGraphs(
                forward,
                self.backend,
                vocab_size=VOCAB_SIZE,
                max_batch=max_batch,
                device=torch.device("cpu"),
                capture=play,
            )

    @torch.inference_mode()
    def decode(self, *shares: tuple[int, int, Sequence[int]]) -> torch.Tensor:
        """One token each: (token id, computed before, block table)."""
        metadata = decodes(*((computed, table) for _, computed, table in shares))
        assert self.graphs.takes(metadata)
        token_ids = torch.tensor([token for token, _, _ in shares])
        return self.graphs.run(token_ids, torch.from_numpy(metadata.positions), metadata).clone()


def decodes(*shares: tuple[int, Sequence[int]]) -> AttentionMetadata:
    requests = [ScheduledRequest(str(i), [0], computed, (table,), None) for i, (computed, table) in enumerate(shares)]
    return build_metadata(requests, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_model(path)
    return path


@pytest.mark.parametrize(
    ("max_batch", "sizes"),
    [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]), (9, [1, 2, 4, 8, 9])],
)
def test_sizes_rise_to_the_largest_batch(max_batch: int, sizes: list[int]) -> None:
    assert graph_sizes(max_batch) == sizes


def test_padding_adds_requests_of_one_token_in_the_null_block() -> None:
    metadata = padded(decodes((5, [7, 3]), (0, [9])), 4)
    assert metadata.num_decodes == metadata.num_requests == 4
    assert metadata.query_start.tolist() == [0, 1, 2, 3, 4]
    assert metadata.context_lens.tolist() == [6, 1, 1, 1]
    assert metadata.block_tables.tolist() == [[7, 3], [9, 0], [0, 0], [0, 0]]
    assert metadata.slot_mapping.tolist() == [3 * BLOCK_SIZE + 1, 9 * BLOCK_SIZE, 0, 0]
    assert metadata.positions.tolist() == [5, 0, 0, 0]
    full = decodes((5, [7, 3]))
    assert padded(full, 1) is full


def test_a_graph_takes_steps_of_decodes_alone_and_no_larger_ones(folder: Path) -> None:
    runner = Runner(folder, max_batch=2)
    chunk = build_metadata([ScheduledRequest("a", [0, 0], 0, ([1],), None)], block_size=BLOCK_SIZE)
    assert not runner.graphs.takes(chunk)
    assert runner.graphs.takes(decodes((0, [1]), (3, [2])))
    assert not runner.graphs.takes(decodes((0, [1]), (3, [2]), (1, [3])))


def test_a_replayed_step_gives_the_logits_of_a_plain_one_for_every_batch_size(folder: Path) -> None:
    runner, plain = Runner(folder, max_batch=10), PagedRunner(folder, block_size=BLOCK_SIZE)
    assert runner.backend.replayed == [10, 8, 4, 2, 1], "captured once each, the largest first"
    tokens = [random_tokens(3 + i, seed=i) for i in range(10)]
    tables = [[1 + 5 * i, 3 + 5 * i, 2 + 5 * i] for i in range(10)]
    for each in (runner, plain):
        each.step(*((t[:-1], 0, table) for t, table in zip(tokens, tables, strict=True)))
    for batch in (1, 2, 3, 4, 7, 8, 9, 10, 5):
        logits = runner.decode(*((tokens[i][-1], len(tokens[i]) - 1, tables[i]) for i in range(batch)))
        expected = plain.step(*((tokens[i][-1:], len(tokens[i]) - 1, tables[i]) for i in range(batch)))
        torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-5, atol=1e-5)
    for layer, plain_layer in zip(runner.layer_kvs, plain.layer_kvs, strict=True):
        torch.testing.assert_close(layer[1:], plain_layer[1:], rtol=1e-5, atol=1e-5, equal_nan=True)
        assert torch.isnan(layer[0, :, :, 1:]).all(), "padding writes slot 0 of the null block, and nothing else"


def test_what_a_graph_reads_lives_as_long_as_the_graphs() -> None:
    """A graph knows addresses only: a tensor that nobody else keeps would be freed under it."""
    read: list[StorageWeakRef] = []

    def forward(*tensors: torch.Tensor) -> torch.Tensor:
        read.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        return torch.zeros(len(tensors[0]), VOCAB_SIZE)

    def forget(step: Callable[[], None]) -> Callable[[], None]:
        step()
        return lambda: None

    graphs = DecodeGraphs(
        forward, ReplayingBackend(), vocab_size=VOCAB_SIZE, max_batch=4, device=torch.device("cpu"), capture=forget
    )
    gc.collect()
    assert len(read) == 3 * len(graphs.sizes)
    assert not any(storage.expired() for storage in read)

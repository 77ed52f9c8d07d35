"""Rows of a prompt reduced to log-probabilities: in slices, and alike on a host and on a device."""

import pytest
import torch

from engine.executor import SampledToken
from engine.sampling import device_slabs
from engine.sampling.prompt_logprobs import ROWS_AT_ONCE, _on_device, _on_host, prompt_logprobs


def random_logits(num_rows: int, vocab_size: int = 50) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 4


@pytest.mark.parametrize("num_targets", [1, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 3 * ROWS_AT_ONCE + 5])
def test_rows_are_asked_for_once_each_some_at_a_time(num_targets: int) -> None:
    logits = random_logits(300)
    targets = [(7 * i) % 50 for i in range(num_targets)]
    asked: list[list[int]] = []

    def make_logits(rows: torch.Tensor) -> torch.Tensor:
        asked.append(rows.tolist())
        return logits[rows]

    found = prompt_logprobs(make_logits, 11, targets, 3, torch.device("cpu"))
    assert [row for rows in asked for row in rows] == list(range(11, 11 + num_targets))
    assert max(map(len, asked)) <= ROWS_AT_ONCE
    assert found == _on_host(logits[11 : 11 + num_targets], targets, 3)
    exact = logits[11 : 11 + num_targets].double().log_softmax(dim=1)
    for token, target, row in zip(found, targets, exact, strict=True):
        assert token.token_id == target
        assert token.logprob == pytest.approx(float(row[target]), abs=1e-12)
        assert [i for i, _ in token.top] == row.topk(3).indices.tolist()


@pytest.mark.parametrize("num_top", [0, 1, 5, 50, 60])
def test_a_device_answers_as_a_host_does(num_top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_slabs, "ENTRIES_AT_ONCE", 150)
    logits = random_logits(10)
    logits[3, 20:] = -torch.inf
    logits[4, :] = 1.0
    targets = [0, 1, 2, 30, 4, 5, 6, 7, 8, 49]

    def numbers(tokens: list[SampledToken]) -> list[list[float]]:
        return [[token.logprob or 0.0, *(value for _, value in token.top)] for token in tokens]

    ours, theirs = _on_device(logits, targets, num_top), _on_host(logits, targets, num_top)
    assert [(t.token_id, [i for i, _ in t.top]) for t in ours] == [(t.token_id, [i for i, _ in t.top]) for t in theirs]
    for row, expected in zip(numbers(ours), numbers(theirs), strict=True):
        assert row == pytest.approx(expected, abs=1e-12)

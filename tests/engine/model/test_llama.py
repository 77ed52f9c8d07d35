"""The decoder against transformers, in float32: every architecture, cached, chunked, batched."""

from pathlib import Path

import pytest
import torch

from tests.tiny_models import MODELS, PagedRunner, logits_of, make_model, random_tokens, save_model

TOLERANCE = 1e-4
# 37 tokens over blocks of 4, anywhere in the pool.
SCATTERED = [31, 2, 17, 60, 5, 44, 9, 1, 23, 50]


@pytest.fixture(scope="module", params=MODELS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_model(folder, request.param)
    return folder, logits_of(model, random_tokens(37))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunks", [[37], [1], [16], [5, 11, 3], [36, 1], [7]], ids=str)
def test_logits_equal_transformers_when_computed_in_chunks(tiny: tuple[Path, torch.Tensor], chunks: list[int]) -> None:
    folder, expected = tiny
    close(PagedRunner(folder).run(random_tokens(37), chunks, SCATTERED), expected)


def test_logits_equal_transformers_on_the_kernels_that_serve(tiny: tuple[Path, torch.Tensor]) -> None:
    folder, expected = tiny
    runner = PagedRunner(folder, attention_backend="cpu")
    close(runner.run(random_tokens(37), [20, 1], SCATTERED), expected)


def test_logits_of_a_request_are_its_own_when_others_share_the_batch(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama")
    runner = PagedRunner(tmp_path)
    prompts = [random_tokens(n, seed=n) for n in (9, 1, 14)]
    tables = [[3, 8, 1], [12], [7, 2, 30, 11]]
    # Two are ahead of the last, so that the last step mixes decodes with a chunk.
    for prompt, table in zip(prompts[:2], tables[:2], strict=True):
        if len(prompt) > 1:
            runner.step((prompt[:-1], 0, table))
    shares = [(p[-1:], len(p) - 1, t) for p, t in zip(prompts[:2], tables[:2], strict=True)]
    together = runner.step(*shares, (prompts[2], 0, tables[2]))
    for prompt, logits in zip(prompts, together, strict=True):
        close(logits, logits_of(model, prompt)[-len(logits) :])


def test_logits_do_not_change_in_any_bit_when_batch_mates_come_and_go(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    runner = PagedRunner(tmp_path, attention_backend="cpu")
    prompts = [random_tokens(10, seed=n) for n in range(7)]
    tables = [[1 + 3 * n, 2 + 3 * n, 3 + 3 * n] for n in range(7)]
    for prompt, table in zip(prompts, tables, strict=True):
        runner.step((prompt[:-1], 0, table))
    shares = [(p[-1:], len(p) - 1, t) for p, t in zip(prompts, tables, strict=True)]
    alone = [runner.step(share)[0] for share in shares]
    for size in (2, 3, 7):
        for share, logits in zip(shares[:size], runner.step(*shares[:size]), strict=True):
            assert torch.equal(logits, alone[shares.index(share)])


def test_the_context_beyond_a_window_is_never_read(tmp_path: Path) -> None:
    model = save_model(tmp_path, "mistral-window")
    tokens = random_tokens(37)
    runner = PagedRunner(tmp_path)
    runner.run(tokens[:-1], [36], SCATTERED)
    # The window is 7: of the table, only the blocks of positions 30 … 36 are left.
    left = [0] * 7 + SCATTERED[7:]
    close(runner.step((tokens[-1:], 36, left))[0], logits_of(model, tokens)[-1:])


def test_bfloat16_errs_no_more_than_transformers_in_bfloat16(tmp_path: Path) -> None:
    exact = logits_of(save_model(tmp_path, "llama"), random_tokens(37))
    theirs = logits_of(make_model("llama").to(torch.bfloat16), random_tokens(37)).float()
    ours = PagedRunner(tmp_path, dtype=torch.bfloat16).run(random_tokens(37), [16, 1], SCATTERED)
    assert ours.dtype == torch.float32
    assert (ours - exact).std() < 1.2 * (theirs - exact).std()

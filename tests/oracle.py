"""The oracle: the embedded model as transformers runs it, in float32, greedy.

Imported by tests only through the `oracle` fixture, which loads the model once a session.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engine.model.locate import EMBEDDED_MODEL, resolve_model


class Oracle:
    """transformers' answers for the embedded model; what was asked before is remembered."""

    def __init__(self, gguf_file: Path | None = None) -> None:
        path = gguf_file or resolve_model(EMBEDDED_MODEL)
        self._model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def reference_greedy(self, prompt_ids: Sequence[int], n: int) -> list[int]:
        """The `n` best next tokens, one after the other; the end of the sequence does not stop it."""
        answer = self._answers.setdefault(tuple(prompt_ids), [])
        if len(answer) < n:
            answer[:] = self._generate(list(prompt_ids), n)
        return answer[:n]

    @torch.inference_mode()
    def best_next(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        """The best token at the place of each of `token_ids`, given all before it.

        `token_ids` are the greedy tokens just if they are equal to these (each is, if those before it are): the same
        check as `reference_greedy`, in one forward pass.
        """
        logits = self.logits([*prompt_ids, *token_ids[:-1]])[len(prompt_ids) - 1 :]
        best: list[int] = logits.argmax(-1).tolist()
        return best

    @torch.inference_mode()
    def _generate(self, prompt_ids: list[int], n: int) -> list[int]:
        inputs = torch.tensor([prompt_ids])
        outputs = self._model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=n, pad_token_id=0
        )
        tokens: list[int] = outputs[0, len(prompt_ids) :].tolist()
        assert len(tokens) == n
        return tokens

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[num_tokens, vocab_size] float32."""
        logits: torch.Tensor = self._model(torch.tensor([list(token_ids)])).logits[0]
        return logits

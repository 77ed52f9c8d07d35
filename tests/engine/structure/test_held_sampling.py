"""Whole texts, sampled from random logits under a structure, by both samplers."""

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from engine.executor import SamplingInput
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams, finish_reason_after
from engine.structure.spec import StructureKind
from structured import BYTES, byte_tokenizer, compiled

TOKENIZER = byte_tokenizer([*BYTES, b'{"', b'": ', b'", "', b'"}', b"null", "é".encode(), b"ab", b"12"])
VOCAB_SIZE = TOKENIZER.vocab_size + 20  # as models pad their embeddings
EOS = 0

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["é", "ab", "abc"]},
        "note": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 900}, "maxItems": 3},
        "inner": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "string", "pattern": "^[0-9a-f]{4}$"}]},
    },
    "required": ["kind", "note", "sizes"],
    "additionalProperties": False,
}
REGEX = r"([a-f]{1,3}-\d{1,4}(é|ø)?\n){1,4}"
CHOICES = ["yes", "yes, but", "", "\N{GRINNING FACE}"]


def check_json(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def check_regex(text: str) -> None:
    assert re.fullmatch(REGEX, text, re.ASCII)


def check_choice(text: str) -> None:
    assert text in CHOICES


HELD = {
    "schema": (StructureKind.JSON_SCHEMA, json.dumps(SCHEMA), check_json),
    "regex": (StructureKind.REGEX, REGEX.replace(r"\d", "[0-9]"), check_regex),
    "choice": (StructureKind.CHOICE, json.dumps(CHOICES), check_choice),
}
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "limited": {"temperature": 2.0, "top_k": 40, "top_p": 0.95},
    "bent": {"repetition_penalty": 1.7, "frequency_penalty": 1.0, "logit_bias": {EOS: -100.0, 200: 100.0, 270: 100.0}},
    "not to stop": {"min_tokens": 1000, "temperature": 0.7},
}


@pytest.mark.parametrize("wishes", WISHES.values(), ids=WISHES)
@pytest.mark.parametrize("name", HELD)
def test_a_text_that_is_sampled_to_its_end_has_its_structure(name: str, wishes: dict[str, Any]) -> None:
    kind, text, check = HELD[name]
    structure = compiled(kind, text, TOKENIZER, VOCAB_SIZE)
    texts = set[str]()
    for seed in range(12):
        params = SamplingParams(max_tokens=1000, seed=seed, stop_token_ids=(EOS,), logprobs=1, **wishes)
        rng, output = np.random.default_rng(seed), list[int]()
        matcher, device_matcher = structure.matcher(), structure.matcher()
        while EOS not in output:
            assert len(output) < 300, "structures of this test are finite"
            logits = torch.tensor(rng.standard_normal((1, VOCAB_SIZE)).astype(np.float32) * 3)
            inputs = SamplingInput(params, [1, 2], output, matcher)
            [token] = Sampler().sample(logits, [inputs])
            [of_device] = DeviceSampler().sample(logits, [SamplingInput(params, [1, 2], output, device_matcher)])
            assert of_device.token_id == token.token_id
            assert of_device.logprob == pytest.approx(token.logprob)
            output.append(token.token_id)
        assert wishes.get("min_tokens") or finish_reason_after(params, output[-1], len(output), len(output) + 2, 9999)
        texts.add(b"".join(TOKENIZER.token_bytes(i) for i in output[:-1]).decode("utf-8"))
    for sampled in texts:
        check(sampled)
    assert len(texts) > 1

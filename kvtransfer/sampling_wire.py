"""Sampling parameters and sampled tokens to protobuf and back: towards a worker, by whichever stream.

Towards a worker every field is set: what a client left out was resolved by the gateway. Floats are 32 bits on the wire;
the first conversion rounds them and the next ones change nothing, so that all workers sample with the same numbers.
"""

from collections.abc import Sequence

from engine.executor import SampledToken
from engine.sampling_params import SamplingParams
from engine.structure.spec import Structure, StructureKind
from tandem.v1 import sampling_pb2


def sampling_params_to_wire(params: SamplingParams) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        seed=params.seed,
        logit_bias=params.logit_bias,
        structure=structure_to_wire(params.structure),
        n=1,
    )


def sampling_params_from_wire(wire: sampling_pb2.SamplingParams) -> SamplingParams:
    """
    Raises:
        ValueError: a field that a worker needs is absent, or out of its range.
    """
    for name in ("temperature", "top_p", "repetition_penalty", "max_tokens", "seed"):
        if not wire.HasField(name):
            raise ValueError(f"sampling_params.{name} is absent: a gateway resolves every default")
    if wire.n > 1:
        raise ValueError(f"sampling_params.n must be 1 towards a worker, not {wire.n}")
    return SamplingParams(
        max_tokens=wire.max_tokens,
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        min_p=wire.min_p,
        repetition_penalty=wire.repetition_penalty,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        logit_bias=dict(wire.logit_bias),
        seed=wire.seed,
        logprobs=wire.logprobs if wire.HasField("logprobs") else None,
        prompt_logprobs=wire.prompt_logprobs if wire.HasField("prompt_logprobs") else None,
        min_tokens=wire.min_tokens,
        stop_token_ids=tuple(wire.stop_token_ids),
        structure=structure_from_wire(wire.structure) if wire.HasField("structure") else None,
    )


def structure_to_wire(structure: Structure | None) -> sampling_pb2.StructuredOutput | None:
    """None: free text.

    Raises:
        ValueError: a choice that is no JSON array of strings, or text that UTF-8 cannot express.
    """
    match structure:
        case None:
            return None
        case Structure(StructureKind.JSON_OBJECT):
            return sampling_pb2.StructuredOutput(json_object=True)
        case Structure(StructureKind.CHOICE):
            return sampling_pb2.StructuredOutput(choice=sampling_pb2.StringChoice(strings=structure.choices()))
        case Structure(kind, text, strict):
            wire = sampling_pb2.StructuredOutput(strict=True if strict else None)
            setattr(wire, kind.value, text)
            return wire


def structure_from_wire(wire: sampling_pb2.StructuredOutput) -> Structure | None:
    """None: free text. Whether the structure is a good one is not looked at."""
    match wire.WhichOneof("structure"):
        case None:
            return None
        case "json_object":
            return Structure(StructureKind.JSON_OBJECT) if wire.json_object else None
        case "choice":
            return Structure.of_choices(wire.choice.strings)
        case "json_schema":
            return Structure(StructureKind.JSON_SCHEMA, wire.json_schema, wire.strict)
        case kind:
            return Structure(StructureKind(kind), getattr(wire, kind))


def logprobs_to_wire(token: SampledToken) -> sampling_pb2.TokenLogprobs | None:
    """None: the token carries none."""
    if token.logprob is None:
        return None
    return sampling_pb2.TokenLogprobs(
        logprob=token.logprob,
        top_token_ids=[token_id for token_id, _ in token.top],
        top_logprobs=[logprob for _, logprob in token.top],
    )


def sampled_token_from_wire(token_id: int, wire: sampling_pb2.TokenLogprobs | None) -> SampledToken:
    """
    Raises:
        ValueError: token ids and their logprobs do not pair up.
    """
    if wire is None:
        return SampledToken(token_id)
    return SampledToken(token_id, wire.logprob, tuple(zip(wire.top_token_ids, wire.top_logprobs, strict=True)))


def prompt_logprobs_to_wire(tokens: Sequence[SampledToken], num_top: int) -> sampling_pb2.PromptLogprobs:
    """Log-probabilities of a prompt's tokens, from the second on.

    Args:
        num_top: best ones to list for each token; fewer are where the vocabulary has fewer.
    """
    num_top = min([num_top, *(len(token.top) for token in tokens)])
    logprobs = [token.logprob for token in tokens if token.logprob is not None]
    assert len(logprobs) == len(tokens), f"{len(tokens) - len(logprobs)} of {len(tokens)} tokens have no logprob"
    wire = sampling_pb2.PromptLogprobs(logprobs=logprobs, num_top=num_top)
    # Columns: a long prompt has some hundred thousand numbers.
    wire.top_token_ids.extend(token_id for token in tokens for token_id, _ in token.top[:num_top])
    wire.top_logprobs.extend(logprob for token in tokens for _, logprob in token.top[:num_top])
    return wire


def prompt_logprobs_from_wire(
    wire: sampling_pb2.PromptLogprobs, prompt_token_ids: Sequence[int]
) -> tuple[SampledToken, ...]:
    """Of each token of the prompt but the first.

    Raises:
        ValueError: they are of another number of tokens, or token ids and their logprobs do not pair up.
    """
    num_tokens, num_top = len(wire.logprobs), wire.num_top
    if num_tokens != len(prompt_token_ids) - 1:
        raise ValueError(f"log-probabilities of {num_tokens} tokens for a prompt of {len(prompt_token_ids)}")
    if not len(wire.top_token_ids) == len(wire.top_logprobs) == num_tokens * num_top:
        raise ValueError(
            f"{len(wire.top_token_ids)} best tokens and {len(wire.top_logprobs)} log-probabilities of them, "
            f"not {num_top} for each of {num_tokens} tokens"
        )
    best = list(zip(wire.top_token_ids, wire.top_logprobs, strict=True))
    return tuple(
        SampledToken(token_id, logprob, tuple(best[i * num_top : (i + 1) * num_top]))
        for i, (token_id, logprob) in enumerate(zip(prompt_token_ids[1:], wire.logprobs, strict=True))
    )

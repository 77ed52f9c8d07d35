"""How to continue a prompt, as a client of gRPC says it. Absent fields mean what the .proto file says."""

from typing import TypeVar, cast

from cluster.errors import InvalidRequest
from cluster.generation.chat import json_object
from cluster.generation.prompt import Prompt
from cluster.text_request import TextOptions
from cluster.tools.answer_structure import answer_origin
from cluster.tools.schema_depth import check_depth
from engine.structure.spec import Structure
from kvtransfer.sampling_wire import structure_from_wire
from tandem.v1 import generation_pb2, sampling_pb2

V = TypeVar("V")


def text_options(request: generation_pb2.GenerateRequest, prompt: Prompt, timeout_s: float | None) -> TextOptions:
    """
    Args:
        prompt: what it says of tools.
        timeout_s: what is left until the call's deadline; None: it has none.

    Raises:
        InvalidRequest: a structure that nothing can have, or that leaves no room for calls. Ranges are checked where
            the request is planned.
    """
    params = request.sampling_params
    content = _structure(params.structure)
    structure = prompt.held_to(content)

    def given(name: str, default: V) -> V:
        return cast("V", getattr(params, name)) if params.HasField(name) else default

    return TextOptions(
        n=given("n", 1),
        max_tokens=given("max_tokens", None),
        min_tokens=given("min_tokens", 0),
        temperature=given("temperature", 1.0),
        top_p=given("top_p", 1.0),
        top_k=given("top_k", 0),
        min_p=given("min_p", 0.0),
        repetition_penalty=given("repetition_penalty", 1.0),
        presence_penalty=given("presence_penalty", 0.0),
        frequency_penalty=given("frequency_penalty", 0.0),
        logit_bias=dict(params.logit_bias),
        seed=given("seed", None),
        logprobs=given("logprobs", None),
        prompt_logprobs=given("prompt_logprobs", None),
        structure=structure,
        structure_origin=answer_origin(prompt.tool_use, content, structure),
        stop=tuple(stop for stop in params.stop if stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=given("ignore_eos", False),
        skip_special_tokens=given("skip_special_tokens", True),
        shown_special_tokens=prompt.shown_special_tokens,
        include_stop_str_in_output=given("include_stop_str_in_output", False),
        cache_salt=request.cache_salt,
        priority=request.priority,
        timeout_s=timeout_s,
    )


def _structure(wire: sampling_pb2.StructuredOutput) -> Structure | None:
    match wire.WhichOneof("structure"):
        case "choice" if not wire.choice.strings:
            raise InvalidRequest("structure.choice must have at least one string", param="structure")
        case "json_schema":
            check_depth(json_object(wire.json_schema, "structure.json_schema"), "structure.json_schema")
    return structure_from_wire(wire)

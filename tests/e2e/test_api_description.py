"""What the gateway says of itself in /openapi.json holds: replies to requests that schemathesis makes from it.

No request, right or wrong, is answered by a server's error; each reply has a status, a content type and a body that the
description has for it. The requests are the same in every run.
"""

from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from cluster.openai.structure_fields import STRUCTURE_FIELDS
from fake_generator import FakeGenerator, served_model
from gateway_api import MODEL, Api

MAX_EXAMPLES = 60
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
)

schema = schemathesis.openapi.from_asgi("/openapi.json", Api(FakeGenerator(served_model(max_model_len=64))).app)


@schema.parametrize()
@settings(
    max_examples=MAX_EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_replies_are_as_described(case: schemathesis.Case) -> None:
    if isinstance(case.body, dict):
        _make_sense(case.body, is_right=case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE)
    case.validate_response(case.call(), checks=list(CHECKS))


def _make_sense(body: dict[str, Any], *, is_right: bool) -> None:
    """What no schema says, and what nearly every request would be refused for."""
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    if isinstance(body.get("stream_options"), dict) and not body.get("stream"):
        body["stream"] = True
    if is_right:
        if not body.get("tools"):
            body.pop("tool_choice", None)
        structures = [name for name in STRUCTURE_FIELDS if body.get(name) is not None]
        for name in structures[1:]:
            del body[name]

"""A schema of arguments without what it does not name.

To JSON Schema an object may have any property that is not forbidden. To who writes a tool the parameters are all there
are, and clients even take out that no others are allowed (LiteLLM does). A small model, left free, makes up more until
its tokens are used up. vLLM closes objects as well (by xgrammar's strict mode).
"""

from collections.abc import Mapping
from typing import Any

# Where schemas are put together, an object has properties that another one names.
_COMBINING = frozenset(
    ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "dependentSchemas", "dependencies")
)
_SAYS_WHAT_ELSE = frozenset(("additionalProperties", "unevaluatedProperties", "patternProperties"))
_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` in each object that names properties and says nothing of others.

    Left as it is, with all that it is put together from: whatever combines schemas.
    """
    return dict(_closed(schema, has_combined=_mentions(schema, "allOf")))


def _closed(schema: Any, *, has_combined: bool) -> Any:
    if not isinstance(schema, Mapping) or _COMBINING & schema.keys():
        return schema
    found = dict(schema)
    for key in _SCHEMAS_BY_NAME:
        # With allOf anywhere, a definition may be a part of another object.
        if isinstance(named := found.get(key), Mapping) and not (has_combined and key != "properties"):
            found[key] = {name: _closed(each, has_combined=has_combined) for name, each in named.items()}
    if "items" in found:
        found["items"] = _closed(found["items"], has_combined=has_combined)
    if isinstance(found.get("properties"), Mapping) and not _SAYS_WHAT_ELSE & found.keys():
        found["additionalProperties"] = False
    return found


def _mentions(schema: Any, keyword: str) -> bool:
    if isinstance(schema, Mapping):
        return keyword in schema or any(_mentions(value, keyword) for value in schema.values())
    return isinstance(schema, list) and any(_mentions(value, keyword) for value in schema)

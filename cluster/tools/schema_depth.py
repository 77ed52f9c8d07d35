"""How deep a JSON schema may be: it is gone through by recursion, here, by chat templates and where it is compiled."""

from collections.abc import Mapping
from typing import Any

from cluster.errors import InvalidRequest

# An object within an object is two deeper. OpenAI allows ten of those; what is deeper is made of references.
MAX_DEPTH = 64


def check_depth(schema: Mapping[str, Any], where: str) -> None:
    """Refuses a schema whose objects and arrays lie more than `MAX_DEPTH` within each other.

    Raises:
        InvalidRequest: `where` names the field.
    """
    # Level by level: by recursion this very check would fail.
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [inner for value in level for inner in _inside(value) if isinstance(inner, Mapping | list)]
        if not level:
            return
    raise InvalidRequest(
        f"{where} is nested too deeply: at most {MAX_DEPTH} objects and arrays within each other are allowed",
        param=where,
    )


def _inside(value: Mapping[str, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, Mapping) else value

"""What pydantic has against a value, in a sentence of ours: the name, what is allowed, and the value that is not."""

import difflib
from collections.abc import Collection
from typing import Any

from pydantic_core import ErrorDetails

_LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
}


def sentence(error: ErrorDetails, known: Collection[str]) -> str:
    """One problem in words, with the name and the offending value.

    Args:
        known: the names that there are.
    """
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "cluster":
        return str(context["sentence"])
    name = str(error["loc"][0])
    if name == "api_key":
        # Never what was given.
        return "api_key: must be one key or a list of keys, each of visible ASCII without spaces"
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(name, known, n=1)
        return f"{name}: there is no such key" + (f"; did you mean {near[0]}?" if near else "")
    # A flag's number comes as text.
    shown = value if kind in _LIMITS or kind == "finite_number" else repr(value)
    return f"{name}: must be {_allowed(kind, context)}, not {shown}"


def _allowed(kind: str, context: dict[str, Any]) -> str:
    if kind in _LIMITS:
        key, words = _LIMITS[kind]
        limit = context[key]
        return f"{words} {limit if isinstance(limit, int) else format(limit, 'g')}"
    if kind == "literal_error":
        return f"one of {context['expected']}".replace("'", "")
    if kind.startswith("int"):
        return "a whole number"
    if kind == "gpus":
        return "1 (a GPU each) or 0.5 (two workers share one)"
    if kind == "origin":
        return 'an origin as browsers send it, such as https://chat.example or http://localhost:3000, or "*" for all'
    if kind.startswith("tuple"):
        return "one text or a list of texts"
    if kind.startswith("bool"):
        return "true or false"
    if kind.startswith("float") or kind == "truth_value":
        return "a number"
    if kind == "finite_number":
        return "finite"
    assert kind.startswith("string"), f"no words for a {kind} of {context}"
    return "text that is not empty" if kind == "string_too_short" else "text"

"""JSON as its standard has it: Python's reader also takes NaN and Infinity, and makes infinity of 1e999."""

import json
import math
from typing import Any, NoReturn


def parse_json(text: str) -> Any:
    """
    Raises:
        ValueError: it is not JSON, or has a number that is none or is out of a double's range.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is out of range")
    return value

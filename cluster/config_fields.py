"""Kinds of values that a configuration has, each with what makes one good; `config_words` says what was wrong."""

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_core import PydanticCustomError


def _no_truth_value(value: object) -> object:
    # To pydantic `true` is 1; in a file of ours it is a mistake.
    if isinstance(value, bool):
        raise PydanticCustomError("truth_value", "must be a number")
    return value


def _one_or_half(gpus: float) -> float:
    if gpus not in (1.0, 0.5):
        raise PydanticCustomError("gpus", "must be 1 or 0.5")
    return gpus


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def is_sound_key(key: str) -> bool:
    """Whether a client could send it: visible ASCII, and some."""
    return re.fullmatch(r"[\x21-\x7e]+", key) is not None


def _sound_key(key: SecretStr) -> SecretStr:
    if not is_sound_key(key.get_secret_value()):
        raise PydanticCustomError("api_key", "must be visible ASCII without spaces")
    return key


def _sound_origin(origin: str) -> str:
    # As a browser sends it: without a path, and in small letters.
    if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+", origin) is None:
        raise PydanticCustomError("origin", "must be an origin")
    return origin


Int = Annotated[int, BeforeValidator(_no_truth_value)]
Float = Annotated[float, BeforeValidator(_no_truth_value)]
Port = Annotated[Int, Field(ge=0, le=65535)]
Seconds = Annotated[Float, Field(gt=0, allow_inf_nan=False)]
GpuShare = Annotated[Float, AfterValidator(_one_or_half)]
FilePath = Annotated[str, Field(min_length=1)]
Keys = Annotated[tuple[Annotated[SecretStr, AfterValidator(_sound_key)], ...], BeforeValidator(_as_list)]
Origins = Annotated[tuple[Annotated[str, AfterValidator(_sound_origin)], ...], BeforeValidator(_as_list)]

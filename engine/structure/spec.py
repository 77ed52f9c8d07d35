"""What a request's text is held to."""

from dataclasses import dataclass
from enum import Enum


class StructureKind(Enum):
    """How `Structure.text` is to be read."""

    JSON_OBJECT = "json_object"  # any JSON object; the text is empty
    JSON_SCHEMA = "json_schema"  # a JSON schema, as JSON
    REGEX = "regex"
    CHOICE = "choice"  # a JSON array of strings: one of them
    GRAMMAR = "grammar"  # Lark's language, as llguidance reads it


@dataclass(frozen=True, slots=True)
class Structure:
    """One structure, not compiled: whether it is a good one is known when a worker has tried."""

    kind: StructureKind
    text: str = ""

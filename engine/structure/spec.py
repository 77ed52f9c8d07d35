"""What a request's text is held to."""

import json
from collections.abc import Iterable
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

    @staticmethod
    def of_choices(choices: Iterable[str]) -> "Structure":
        """A text that is one of `choices`."""
        return Structure(StructureKind.CHOICE, json.dumps(list(choices)))

    def choices(self) -> list[str]:
        """The strings of a choice, as they were given.

        Raises:
            ValueError: the text is no JSON array of strings.
        """
        assert self.kind is StructureKind.CHOICE, self.kind
        try:
            choices = json.loads(self.text)
        except (ValueError, RecursionError) as exc:
            raise ValueError(f"choice is not JSON: {exc}") from exc
        if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
            raise ValueError("choice must be an array of strings")
        return choices

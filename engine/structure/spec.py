"""What a request's text is held to."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

# More than any schema in use has; what is read takes time in proportion at least.
MAX_TEXT_BYTES = 64 << 10


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
    strict: bool = False  # of a JSON schema: a keyword that cannot be held to is an error, not dropped

    def check_text(self) -> None:
        """Whoever passes it on asks first: it is copied into every message, and kept.

        Raises:
            ValueError: it is too long, or is not Unicode.
        """
        kind, num_characters = self.kind.value, len(self.text)
        if num_characters > MAX_TEXT_BYTES:  # then it need not be looked at
            raise ValueError(f"{kind} has {num_characters} characters; at most {MAX_TEXT_BYTES} bytes are allowed")
        try:
            num_bytes = len(self.text.encode("utf-8"))
        except UnicodeEncodeError as exc:
            raise ValueError(f"{kind} has a lone surrogate at character {exc.start}") from exc
        if num_bytes > MAX_TEXT_BYTES:
            raise ValueError(f"{kind} has {num_bytes} bytes; at most {MAX_TEXT_BYTES} are allowed")

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

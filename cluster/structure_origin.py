"""Where a request's structure comes from, so that what is wrong with it is told in the client's words.

A worker knows a structure, not the field that asked for it, and the calls of tools as one grammar.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field

from cluster.errors import InvalidRequest
from engine.structure.spec import Structure

_LINE = re.compile(r"(.*?)in line (\d+): (.*)", re.DOTALL)
_UNFIT_MODEL = "this model cannot be held to structures"  # `worker.structures`


@dataclass(frozen=True, slots=True)
class StructureOrigin:
    """A field of a request.

    Attributes:
        field: whatever is wrong, if nothing better is known.
        lines: of a grammar, counted from 1: the fields that they come from.
    """

    field: str = "structure"
    lines: Mapping[int, str] = dataclass_field(default_factory=dict)

    def named(self, error: InvalidRequest, structure: Structure | None) -> InvalidRequest:
        """The same error, naming the field, if it is about the structure: its message begins with the kind then."""
        if error.param is not None or structure is None:
            return error
        kind, _, problem = error.message.partition(" ")
        if error.message.startswith(_UNFIT_MODEL):
            return InvalidRequest(error.message, param=self.field)
        if kind != structure.kind.value:
            return error
        number = 1
        if self.lines and (found := _LINE.fullmatch(problem)) is not None:
            number, problem = int(found[2]), found[1] + found[3]
        where = self.lines.get(number, self.field)
        # Over gRPC the kinds are fields of the field.
        name = f"{where}.{kind}" if where == "structure" else where
        return InvalidRequest(f"{name} {problem}", param=where)

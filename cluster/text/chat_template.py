"""A conversation as one prompt, by the template that comes with the model.

Templates are Jinja programs out of a model's files: they run in a sandbox that can neither reach the process nor
change what it is given. Their environment is the one that model authors write for, that of transformers:
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop controls, blocks that leave no empty lines, and
the tag `generation`, which marks the assistant's words and changes nothing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.errors import InvalidRequest


class ChatTemplate:
    """A model's chat template, compiled once.

    Raises:
        ValueError: it is no Jinja template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
            names = environment.parse(source).find_all(nodes.Name)
        except jinja2.TemplateError as exc:
            raise ValueError(f"the model's chat template is no valid template: {exc}") from exc
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.uses_tools = any(name.name == "tools" for name in names)  # whether it tells the model of tools

    @cached_property
    def takes_system(self) -> bool:
        """Whether it has a place for a system's message; some models know none, and refuse it or leave it out."""
        told, asked = "\ue000system\ue000", "\ue000user\ue000"
        try:
            text = self.render([{"role": "system", "content": told}, {"role": "user", "content": asked}])
        except InvalidRequest:
            return False
        return told in text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt; with `add_generation_prompt`, it ends where the assistant begins to speak.

        Raises:
            InvalidRequest: the template refuses the conversation, or cannot handle it.
        """
        try:
            return self._template.render(
                **{
                    **self._special_tokens,
                    "documents": None,
                    **(variables or {}),
                    "messages": list(messages),
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as exc:
            raise InvalidRequest(
                f"the model's chat template does not accept this conversation: {exc}", param="messages"
            ) from exc


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` stands for what it encloses."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))

"""Render a conversation to one text, with the Jinja template of a model."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.ext import Extension

ANSWER = "\ue000"  # stands for an answer; no template writes this character


def render(template: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str]) -> str:
    """Return the text of a conversation, up to where the assistant speaks.

    Args:
        template: Jinja template, as in the folders of Hugging Face models.
        messages: the messages, each with `role` and `content`.
        special_tokens: special tokens by the names that templates use, such as `bos_token`.

    Raises:
        ValueError: the template is invalid, or refuses these messages.
    """
    from jinja2 import TemplateError

    try:
        return _compiled(template).render(
            messages=messages, add_generation_prompt=True, tools=None, **special_tokens
        )
    except (TemplateError, TypeError, ArithmeticError, LookupError) as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error


def render_after(
    template: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str]
) -> str:
    """Return the text that follows an answer, from the end of the answer to where the assistant speaks again.

    Args:
        template: as in `render`.
        messages: the messages after the answer.
        special_tokens: as in `render`.

    Raises:
        ValueError: the template is invalid, refuses these messages, or writes one before the answer.
    """
    earlier = [{"role": "user", "content": "."}, {"role": "assistant", "content": ANSWER}]
    usual = render(template, [*earlier, {"role": "user", "content": "."}], special_tokens)
    before, found, after = render(template, [*earlier, *messages], special_tokens).partition(ANSWER)
    if not found or before != usual.partition(ANSWER)[0]:
        raise ValueError("the chat template does not write these messages after an answer: send all messages")
    return after


@cache
def _compiled(template: str) -> "Template":
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(template)


def _generation() -> "type[Extension]":
    """Return the tag `generation`, with which templates mark answers for training; here it has no effect."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as in the base class

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(
                parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
            )

    return Generation


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON, with the arguments that transformers has."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)

"""`unrolled list`."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table


def mechanisms(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table in Markdown, as the README has it.")
    ] = False,
) -> None:
    """List the attention mechanisms and what each supports, as its class declares it.

    Choose one in training with model.attention=NAME, or one per layer with "model.attention=\\[NAME, NAME]".
    """
    if markdown:
        typer.echo(markdown_table())
        return
    header, *rows = abilities()
    table = Table(*header, box=None, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def abilities(names: Sequence[str] | None = None) -> list[list[str]]:
    """Return a header and one row per mechanism, of all mechanisms by default."""
    from dataclasses import fields

    from unrolled import attention
    from unrolled.contract import Supports

    columns = [field.name for field in fields(Supports)]
    rows = [["mechanism", *columns]]
    for name in attention.names() if names is None else names:
        mechanism: Any = attention.load(name)
        values = [getattr(mechanism.supports, column) for column in columns]
        rows.append(
            [name, *("yes" if value is True else "-" if value is False else value for value in values)]
        )
    return rows


def markdown_table(names: Sequence[str] | None = None, *, link: str = "src/unrolled/attention/{}.py") -> str:
    """Return `abilities` in Markdown; each name links to `link`, in which braces stand for it."""
    header, *rows = abilities(names)
    rows = [[f"[{name}]({link.format(name)})", *words] for name, *words in rows]
    lines = [header, ["---", *[":---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

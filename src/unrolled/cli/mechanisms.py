"""`unrolled list`."""

from typing import Any

from rich.console import Console
from rich.table import Table


def mechanisms() -> None:
    """List the attention mechanisms and what each supports, as its class declares it.

    Choose one in training with model.attention=NAME, or one per layer with "model.attention=\\[NAME, NAME]".
    """
    from dataclasses import fields

    from unrolled import attention
    from unrolled.contract import Supports

    abilities = [field.name for field in fields(Supports)]
    table = Table("mechanism", *abilities, box=None, padding=(0, 1, 0, 0))
    for name in attention.names():
        mechanism: Any = attention.load(name)
        values = [getattr(mechanism.supports, ability) for ability in abilities]
        table.add_row(
            name, *("yes" if value is True else "-" if value is False else value for value in values)
        )
    Console().print(table)

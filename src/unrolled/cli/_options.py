"""Options that several commands share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

Force = Annotated[bool, typer.Option("--force", help="Overwrite output that this command did not make.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default cuda if available.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder of the data files; the same as data.data_dir=...")]
Runtime = Annotated[
    Path | None, typer.Option(help="With --web: folder of onnxruntime-web's files, instead of npm.")
]

# ---- sampling: arguments of `unrolled.generation.generate`; None takes its default

Temperature = Annotated[
    float | None, typer.Option(help="Below 1 is safer, above 1 wilder, 0 is greedy; by default 1.")
]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")]
TopP = Annotated[
    float | None,
    typer.Option(help="Sample from the most likely tokens that together have this probability."),
]
MinP = Annotated[
    float | None,
    typer.Option(help="Sample from the tokens at least this fraction as likely as the most likely one."),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1 makes tokens that have occurred less likely; by default 1.")
]


def given(**options: float | None) -> dict[str, Any]:
    """Return the options that were given a value."""
    return {name: value for name, value in options.items() if value is not None}


def refuse(options: Mapping[str, object], purpose: str) -> None:
    """Raise ValueError if an option was given a value, though it is for another purpose."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} is for {purpose}")

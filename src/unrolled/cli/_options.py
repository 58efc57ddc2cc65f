"""Options that several commands share."""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Force = Annotated[bool, typer.Option("--force", help="Overwrite output that this command did not make.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default cuda if available.")]
Weights = Literal["fp32", "bf16", "int8", "int4"]  # of `unrolled.decode`, whose import takes torch
DataDir = Annotated[Path | None, typer.Option(help="Folder of the data files; the same as data.data_dir=...")]
Runtime = Annotated[
    Path | None, typer.Option(help="With --web: folder of onnxruntime-web's files, instead of npm.")
]

SAMPLING: dict[str, Any] = {
    "temperature": Annotated[
        float | None, typer.Option(help="Below 1 is safer, above 1 wilder, 0 is greedy; by default 1.")
    ],
    "top_k": Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")],
    "top_p": Annotated[
        float | None,
        typer.Option(help="Sample from the most likely tokens that together have this probability."),
    ],
    "min_p": Annotated[
        float | None,
        typer.Option(help="Sample from the tokens at least this fraction as likely as the most likely one."),
    ],
    "repetition_penalty": Annotated[
        float | None, typer.Option(help="Above 1 makes tokens that have occurred less likely; by default 1.")
    ],
}
"""The sampling arguments of `unrolled.generation.generate`; None for its default."""


def takes_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `sampling` of a command by the options of `SAMPLING`; it gets those given."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        sampling = {name: arguments.pop(name) for name in SAMPLING}
        command(sampling={name: x for name, x in sampling.items() if x is not None}, **arguments)

    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in SAMPLING.items()
    ]
    parameters = []
    for parameter in signature(command).parameters.values():  # typer lists them in this order
        replaced = options if parameter.name == "sampling" else [parameter]
        parameters += [x.replace(kind=Parameter.KEYWORD_ONLY) for x in replaced]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


def refuse(options: Mapping[str, object], purpose: str) -> None:
    """Raise ValueError if an option was given a value, though it is for another purpose."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} is for {purpose}")

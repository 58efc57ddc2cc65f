"""Options that several commands share."""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Force = Annotated[bool, typer.Option("--force", help="Also overwrite files that this command did not write.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default cuda if available.")]
Weights = Literal["fp32", "bf16", "int8", "int4"]  # of `unrolled.decode`, whose import takes torch
DataDir = Annotated[Path | None, typer.Option(help="Folder of the data files; the same as data.data_dir=...")]
Runtime = Annotated[
    Path | None, typer.Option(help="With --web: folder of onnxruntime-web's files; by default from npm.")
]

SAMPLING: dict[str, Any] = {
    "temperature": Annotated[
        float | None,
        typer.Option(help="Below 1 favours likely tokens; 0 takes the most likely one; by default 1."),
    ],
    "top_k": Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")],
    "top_p": Annotated[
        float | None,
        typer.Option(help="Sample from the most likely tokens that together have this probability."),
    ],
    "min_p": Annotated[
        float | None,
        typer.Option(help="Sample from tokens with at least this fraction of the highest probability."),
    ],
    "repetition_penalty": Annotated[
        float | None, typer.Option(help="Values above 1 make repeated tokens less likely; by default 1.")
    ],
}
"""The options for the sampling arguments of `unrolled.generation.generate`; None stands for its default."""


def takes_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `sampling` of a command by the options in `SAMPLING`.

    The command receives the options that the user has set, as the dict `sampling`.
    """

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
    """Raise ValueError if one of these options, which are for `purpose` only, has a value."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} is for {purpose}")

"""`unrolled list`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from unrolled.cli._options import Force
from unrolled.cli._output import check_picture, require_matplotlib, software

COLUMNS = (
    "causal",
    "bidirectional",
    "cross",
    "padding",
    "packing",
    "recurrence",
    "attn_mask",
    "global_mask",
    "weights",
    "dynamic_length",
    "sequence",
)
"""The fields of `Supports` in the table."""


def mechanisms(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table in Markdown, as in the README.")
    ] = False,
    cells: Annotated[bool, typer.Option("--cells", help="List the recurrent cells instead.")] = False,
    draw: Annotated[
        str | None, typer.Option(metavar="NAME", help="Draw which keys a sparse mechanism attends to.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens in the drawing; by default the first of 64, 256 and 1,024 at which a query does not "
            "read every key.",
        ),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Draw the causal form.")] = False,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the mechanism; the value is YAML."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the drawing; NAME.png by default.")] = None,
    force: Force = False,
) -> None:
    """List the attention mechanisms and what each supports, as its class declares it.

    Select one for training with model.attention=NAME, or one per layer with "model.attention=\\[NAME, NAME]".

    \b
    Draw what a mechanism attends to: a row per query, a column per key, and a
    panel per distinct head.
      unrolled list --draw longformer --set window=8 --set "global_tokens=\\[0, 30]"
      unrolled list --draw window --causal --length 32 --set window=6 \\
        --set "dilation=\\[1, 1, 2, 4]"
    """
    if draw is not None:
        if markdown or cells:
            raise ValueError("--markdown and --cells are for the list, but --draw draws a pattern")
        from unrolled import attention
        from unrolled.cli import run_config
        from unrolled.files import write_file
        from unrolled.ops.options import check_integers

        attention.load(draw)  # names the mechanism in an error before the file
        if length is not None:
            check_integers(1, length=length)
        path = Path(f"{draw}.png") if out is None else out
        check_picture(path, "list", force)
        chosen = run_config.read(None, options or [], example="window=8")
        for tokens in (64, 256, 1024) if length is None else (length,):  # the first that is not dense
            pattern = pattern_of(draw, tokens, chosen, causal=causal)
            pairs = tokens * (tokens + 1) // 2 if causal else tokens * tokens
            dense = int((pattern > 0).sum()) == len(pattern) * pairs
            if not dense:
                break
        image = pattern_image(pattern)
        write_file(path, image)
        typer.echo(f"drawn: {path}")
        if dense:
            typer.echo(
                "the pattern is dense at this size: try a larger --length, or options with --set", err=True
            )
        return
    if options or causal or force or out is not None or length is not None:
        raise ValueError("--set, --causal, --length, --out and --force require --draw")
    if markdown:
        typer.echo(cells_table() if cells else markdown_table())
        return
    header, *rows = cell_rows() if cells else abilities()
    table = Table(*header, box=None, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    console = Console()
    widest = sum(max(map(len, column)) + 1 for column in zip(header, *rows, strict=True))
    console.width = max(console.width, widest)  # do not truncate names
    console.print(table)


def abilities(names: Sequence[str] | None = None) -> list[list[str]]:
    """Return a header and one row per mechanism; all mechanisms by default."""
    from unrolled import attention

    rows = [["mechanism", *COLUMNS]]
    for name in attention.names() if names is None else names:
        supports = attention.load(name).supports
        values = [getattr(supports, column) for column in COLUMNS]
        rows.append([name, *({True: "yes", False: "-"}.get(value, value) for value in values)])
    return rows


def markdown_table(names: Sequence[str] | None = None, *, link: str | None = None) -> str:
    """Return `abilities` in Markdown; each name links to its file, or to `link.format(name)`."""
    header, *rows = abilities(names)
    rows = [[f"[{name}]({link.format(name) if link else source_of(name)})", *words] for name, *words in rows]
    lines = [header, ["---", *[":---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source_of(name: str) -> str:
    """Return the path of a mechanism's file in the repository; a large mechanism is a folder."""
    from unrolled import attention

    is_folder = (Path(attention.__path__[0]) / name).is_dir()
    return f"src/unrolled/attention/{name}" if is_folder else f"src/unrolled/attention/{name}.py"


def cell_rows() -> list[list[str]]:
    """Return a header and one row per recurrent cell: its state, and the first sentence of its file."""
    import importlib
    import inspect

    from unrolled import recurrent

    rows = [["cell", "state", "what it is"]]
    for name in recurrent.names():
        text = inspect.getdoc(importlib.import_module(f"unrolled.recurrent.{name}")) or ""
        title = text.partition("\n")[0].removesuffix(".")
        rows.append([name, recurrent.load(name).supports.recurrence, title])
    return rows


def cells_table() -> str:
    """Return `cell_rows` in Markdown."""
    header, *rows = cell_rows()
    rows = [[f"[{name}](src/unrolled/recurrent/{name}.py)", *words] for name, *words in rows]
    lines = [header, ["---", ":---:", "---"], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def pattern_of(name: str, length: int, options: Mapping[str, Any], *, causal: bool = False) -> Any:
    """Return which keys a mechanism attends to, `[H,length,length]`; see `MultiHeadAttention.pattern`.

    Raises:
        ValueError: the mechanism or one of its options does not exist.
        UnsupportedError: the pattern depends on the data, or is dense.
    """
    from unrolled import attention

    mechanism: Any = attention.load(name)
    shared: dict[str, Any] = {"d_model": 32, "n_heads": 4, "causal": causal}
    if fixed := shared.keys() & options.keys():
        raise ValueError(f"{min(fixed)} is given, but drawings are of 4 heads, and --causal chooses the kind")
    try:
        module = mechanism(**shared, **options)
    except TypeError as error:
        raise ValueError(f"invalid options for {name}: {error}") from error
    return module.pattern(length)


def pattern_image(pattern: Any) -> bytes:
    """Draw a pattern as PNG, with a panel per distinct head.

    Raises:
        ValueError: matplotlib is missing.
    """
    require_matplotlib()
    from unrolled.bench import plots

    heads: dict[str, Any] = {}
    for head, reads in enumerate(pattern):
        same = next((label for label, other in heads.items() if other.equal(reads)), None)
        if same is not None:
            heads[f"{same}, {head}"] = heads.pop(same)
        else:
            heads[str(head)] = reads
    titles = [""] if len(heads) == 1 else [f"head{'s' * (',' in label)} {label}" for label in heads]
    panels = dict(zip(titles, (reads.numpy() for reads in heads.values()), strict=True))
    return plots.png(plots.patterns(plots.LIGHT, panels), software("list"))

"""`unrolled table`."""

from dataclasses import dataclass
from typing import Annotated

import typer

LENGTHS = (512, 1024, 2048, 4096, 8192)

SYMBOLS = (
    "n tokens, d width, k kernel, w window, g global tokens, r random tokens or rank, c tokens per chunk, "
    "R rounds of hashing, N rows of a memory, W their width."
)
COUNTED = (
    "Cost counts multiplications: for attention, those of the scores and weighted sums, without the "
    "projections, which are n d² for all; full attention is therefore cheap if n < d. Sequential operations "
    "are those that training cannot run in parallel. The longest path is the number of layers or steps "
    "between the two most distant tokens. The state is the numbers kept to generate one more token, if a "
    "layer can generate. Recurrent, convolutional, full and restricted layers: Vaswani et al. 2017, arXiv "
    "1706.03762, table 1."
)


@dataclass(frozen=True)
class Layer:
    """A row of the table.

    Attributes:
        name: name of the layer.
        cost: multiplications for n tokens.
        sequential: sequential operations in training.
        path: longest path between two tokens.
        state: numbers kept to generate one more token; "-" if it cannot generate.
        module: the mechanism or kind of module to measure; None if the library has none.
    """

    name: str
    cost: str
    sequential: str
    path: str
    state: str
    module: str | None = None

    @property
    def exponent(self) -> str:
        """The exponent of n in the cost, to compare with a measurement."""
        power = 2 if "n²" in self.cost else 1.5 if "n √n" in self.cost else 1
        return f"{power} and log" if "log n" in self.cost else f"{power}"


LAYERS = (
    Layer("recurrent (LSTM)", "n d²", "O(n)", "O(n)", "d", "lstm"),
    Layer("convolution", "k n d²", "O(1)", "O(n / k)", "k d", "convolution"),
    Layer("convolution, dilated", "k n d²", "O(1)", "O(log_k n)", "k d log_k n"),
    Layer("convolution, separable", "k n d + n d²", "O(1)", "O(n / k)", "k d", "separable"),
    Layer("full attention", "n² d", "O(1)", "O(1)", "n d", "softmax"),
    Layer("restricted to a window", "n w d", "O(1)", "O(n / w)", "w d", "window"),
    Layer("Longformer", "n (w + g) d", "O(1)", "O(1), by a global token", "(w + g) d", "longformer"),
    Layer("BigBird", "n (w + g + r) d", "O(1)", "O(1), by a global token", "-", "bigbird"),
    Layer("Sparse Transformer", "n √n d", "O(1)", "O(1)", "√n d to n d", "sparse_transformer"),
    Layer("Reformer", "R n c d + R n log n", "O(log n)", "O(log n), by the data", "n d", "reformer"),
    Layer("Linformer", "n r d", "O(1)", "O(1)", "-", "linformer"),
    Layer("Nyströmformer", "n r d", "O(1)", "O(1)", "-", "nystromformer"),
    Layer("linear attention", "n d²", "O(1), causal O(log n)", "O(1)", "d²", "linear"),
    Layer("LSTMN", "n² d", "O(n)", "O(1)", "n d"),
    Layer("Neural Turing Machine", "n N W", "O(n)", "O(1), once written", "N W"),
)


def table(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Add exponents of measured times; takes a minute or two.")
    ] = False,
    lengths: Annotated[
        str | None,
        typer.Option(
            help=f"Lengths to measure, separated by commas; by default {','.join(map(str, LENGTHS))}."
        ),
    ] = None,
) -> None:
    """Print the cost of layers: operations, sequential operations, longest path, state.

    A measured exponent p means that the time of a forward pass grows as n^p over the larger half of the
    lengths, on one thread. Overheads of constant cost lower it for small layers.
    """
    from unrolled.cli._lengths import parse_lengths
    from unrolled.cli._options import refuse

    times: dict[str, float] | None = None
    chosen = list(LENGTHS) if lengths is None else list(parse_lengths(lengths, least=2))
    if not measure:
        refuse({"--lengths": lengths}, "--measure")
    else:
        from unrolled.bench import layer_times

        times = {x.name: layer_times.growth(x.module, chosen) for x in LAYERS if x.module is not None}
    header, *rows = cells(times)
    if markdown:
        for line in [header, ["---"] * len(header), *rows]:
            typer.echo(f"| {' | '.join(line)} |")
        typer.echo()
    else:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for line in [header, *rows]:
            typer.echo("  ".join(f"{cell:{w}}" for cell, w in zip(line, widths, strict=True)).rstrip())
        typer.echo()
    typer.echo(SYMBOLS)
    typer.echo(COUNTED)
    if measure:
        typer.echo(f"Measured: {layer_times.SETUP}, at {', '.join(map(str, chosen))} tokens.")


def cells(times: dict[str, float] | None = None) -> list[list[str]]:
    """Return a header and one row per layer; measured exponents add two columns."""
    header = ["layer", "cost per layer", "sequential operations", "longest path", "state"]
    rows = [[x.name, x.cost, x.sequential, x.path, x.state] for x in LAYERS]
    if times is not None:
        header += ["exponent of n", "measured"]
        for row, layer in zip(rows, LAYERS, strict=True):
            row += [layer.exponent, f"{times[layer.name]:.2f}" if layer.name in times else "-"]
    return [header, *rows]

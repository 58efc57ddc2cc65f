"""Pictures of what models attend to. Importing this module needs matplotlib."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from unrolled.cli.plots import FONT_SIZE, Theme

CELL = 0.27  # inches of a row or column with a name
LETTER = 0.085  # inches of a letter of a name
LONGEST = 8.0  # inches of a trace at most

Weights = NDArray[np.floating]


class Alignment(NamedTuple):
    """Weights `[T,S]` of T words of a translation, the rows, on S words of its source, the columns."""

    weights: Weights
    rows: Sequence[str]
    columns: Sequence[str]


def alignments(theme: Theme, panels: Sequence[Alignment], across: int = 2) -> Figure:
    """Draw alignments as Bahdanau et al. 2015 (arXiv 1409.0473, fig. 3) print them: 0 black, 1 white."""
    across = min(across, len(panels))
    down = -(-len(panels) // across)
    widest = max(CELL * len(x.columns) + LETTER * max(map(len, x.rows)) for x in panels) + 0.4
    highest = max(CELL * len(x.rows) + LETTER * max(map(len, x.columns)) for x in panels) + 0.4
    figure = Figure(figsize=(across * widest, down * highest), facecolor=theme.paper, layout="constrained")
    for place, (weights, rows, columns) in enumerate(panels):
        axes = figure.add_subplot(down, across, place + 1)
        axes.imshow(weights, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.xaxis.tick_top()
        axes.set_xticks(range(len(columns)), columns, rotation=90)
        axes.set_yticks(range(len(rows)), rows)
        _plain(theme, axes)
    return figure


def hops(theme: Theme, weights: Weights, sentences: Sequence[str], title: str) -> Figure:
    """Draw what each hop (column) reads of each sentence (row): `weights [M,hops]`, with their numbers."""
    longest = max(map(len, sentences))
    size = (LETTER * max(longest + 10 * weights.shape[1], len(title)) + 0.6, CELL * len(sentences) + 0.9)
    figure = Figure(figsize=size, facecolor=theme.paper, layout="constrained")
    axes = figure.add_subplot()
    low, high = min(0.0, float(weights.min())), max(1.0, float(weights.max()))
    axes.imshow(weights, cmap="gray_r", vmin=low, vmax=high, interpolation="nearest", aspect="auto")
    axes.xaxis.tick_top()
    axes.set_xticks(range(weights.shape[1]), [f"hop {hop + 1}" for hop in range(weights.shape[1])])
    axes.set_yticks(range(len(sentences)), sentences)
    for (row, hop), weight in np.ndenumerate(weights):
        if abs(weight) >= 0.005:
            colour = theme.paper if weight > (low + high) / 2 else theme.ink
            axes.text(hop, row, f"{weight:.2f}", ha="center", va="center", color=colour, fontsize=8)
    _plain(theme, axes)
    figure.suptitle(title, x=0.01, ha="left", fontsize=FONT_SIZE, color=theme.ink)
    return figure


def heads(theme: Theme, panels: Sequence[tuple[str, Weights]]) -> Figure:
    """Draw where heads were, `[T,N]` under a title each: steps to the right, places of the memory up."""
    steps, places = panels[0][1].shape
    width = min(LONGEST, 1 + 0.1 * steps)
    height = min(LONGEST / 2, 0.8 + 0.05 * places)
    figure = Figure(figsize=(width, height * len(panels)), facecolor=theme.paper, layout="constrained")
    for place, (title, weights) in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, place + 1)
        axes.imshow(
            weights.T, cmap="gray", vmin=0, vmax=1, interpolation="nearest", aspect="auto", origin="lower"
        )
        axes.set_title(title, loc="left", fontsize=FONT_SIZE, color=theme.ink)
        axes.set_xlabel("step", color=theme.ink)
        axes.set_ylabel("place", color=theme.ink)
        _plain(theme, axes)
    return figure


def _plain(theme: Theme, axes: Axes) -> None:
    axes.spines[:].set_color(theme.faint)
    axes.tick_params(length=0, labelcolor=theme.ink, labelsize=FONT_SIZE - 1)

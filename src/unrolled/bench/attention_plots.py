"""Plots of attention weights. Importing this module needs matplotlib."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from numpy.typing import NDArray

from unrolled.bench.plots import DPI, FONT_SIZE, Theme

CELL = 0.27  # inches of a row or column with a name
MOST_LETTERS = 60  # of a name, before its middle is left out
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
    panels = [Alignment(x.weights, _shortened(x.rows), _shortened(x.columns)) for x in panels]
    widest = max(CELL * len(x.columns) + _inches(x.rows) for x in panels) + 0.4
    highest = max(CELL * len(x.rows) + _inches(x.columns) for x in panels) + 0.4
    figure = Figure(figsize=(across * widest, down * highest), facecolor=theme.paper, layout="constrained")
    for place, (weights, rows, columns) in enumerate(panels):
        axes = figure.add_subplot(down, across, place + 1)
        axes.imshow(weights, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.xaxis.tick_top()
        axes.set_xticks(range(len(columns)), columns, rotation=90, parse_math=False)
        axes.set_yticks(range(len(rows)), rows, parse_math=False)
        _plain(theme, axes)
    return figure


def hops(theme: Theme, weights: Weights, sentences: Sequence[str], title: str) -> Figure:
    """Draw the weight of each sentence (row) in each hop (column): `weights [M,hops]`, with their values."""
    width = max(_inches(sentences) + 0.85 * weights.shape[1], _inches([title]))
    size = (width + 0.6, CELL * len(sentences) + 0.9)
    figure = Figure(figsize=size, facecolor=theme.paper, layout="constrained")
    axes = figure.add_subplot()
    low, high = min(0.0, float(weights.min())), max(1.0, float(weights.max()))
    axes.imshow(weights, cmap="gray_r", vmin=low, vmax=high, interpolation="nearest", aspect="auto")
    axes.xaxis.tick_top()
    axes.set_xticks(range(weights.shape[1]), [f"hop {hop + 1}" for hop in range(weights.shape[1])])
    axes.set_yticks(range(len(sentences)), sentences, parse_math=False)
    for (row, hop), weight in np.ndenumerate(weights):
        if abs(weight) >= 0.005:
            colour = theme.paper if weight > (low + high) / 2 else theme.ink
            axes.text(hop, row, f"{weight:.2f}", ha="center", va="center", color=colour, fontsize=8)
    _plain(theme, axes)
    figure.suptitle(title, x=0.01, ha="left", fontsize=FONT_SIZE, color=theme.ink, parse_math=False)
    return figure


def heads(theme: Theme, panels: Sequence[tuple[str, Weights]]) -> Figure:
    """Draw the weights of heads, `[T,N]` under a title each: steps on the x axis, memory places on y."""
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


def _inches(names: Sequence[str]) -> float:
    """Return the width of the widest name."""
    canvas: Any = FigureCanvasAgg(Figure(dpi=DPI))  # letters are rounded to its pixels
    draw = canvas.get_renderer()
    font = FontProperties(size=FONT_SIZE)
    widths: list[float] = [draw.get_text_width_height_descent(name, font, ismath=False)[0] for name in names]
    return max(widths) / DPI


def _shortened(names: Sequence[str]) -> list[str]:
    half = MOST_LETTERS // 2
    return [x if len(x) <= MOST_LETTERS else f"{x[: half - 1]}…{x[-half:]}" for x in names]


def _plain(theme: Theme, axes: Axes) -> None:
    axes.spines[:].set_color(theme.faint)
    axes.tick_params(length=0, labelcolor=theme.ink, labelsize=FONT_SIZE - 1)

"""The plots of a report. Importing this module needs matplotlib; its global state is not used."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from unrolled.bench.units import brief_time, size

DPI = 200
FONT_SIZE = 10
GAP = 1  # pixels of an image between two images of a sheet
Pixels = NDArray[np.uint8]

NAMES = {
    "linear": "linear",
    "softmax_cache": "softmax,\nKV cache",
    "softmax_recompute": "softmax,\nprefix recomputed",
}
"""Labels of the contenders of `measure.linear_and_softmax`."""


class Theme(NamedTuple):
    """Colours for a light or a dark page; the series have the colour-blind-safe colours of Okabe and Ito."""

    paper: str
    ink: str
    faint: str
    series: tuple[str, str, str]


LIGHT = Theme("#ffffff", "#24292f", "#d8dee4", ("#0072b2", "#d55e00", "#5f6b76"))
DARK = Theme("#15191e", "#d8dee6", "#3a434d", ("#56b4e9", "#e69f00", "#a9b4bf"))


MANY = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5f6b76", "#b3a400")
"""Colours for more series, also of Okabe and Ito."""


class Line(NamedTuple):
    """A series of a plot with its name."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def png(figure: Figure, metadata: Mapping[str, str] | None = None) -> bytes:
    """Render a figure; `metadata` are text chunks of the file, such as `Software`."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata=metadata)
    return file.getvalue()


def digit_sheet(theme: Theme, images: Pixels, levels: int, columns: int = 10) -> Figure:
    """Draw images [N, H, W] side by side, `columns` in a row; N is a multiple of `columns`."""
    grid = images.reshape(-1, columns, *images.shape[1:]) / (levels - 1)
    return _tiles(theme, _grey(grid))


def completion_sheet(
    theme: Theme, originals: Pixels, completed: Pixels, rows_given: int, levels: int
) -> Figure:
    """Draw originals [N, H, W] in the top row, the given pixels below, then completions [N, K, H, W].

    Pixels that the model generated are tinted.
    """
    given = originals.copy()
    given[:, rows_given:] = 0
    tiles = _grey(np.concatenate([originals[None], given[None], completed.swapaxes(0, 1)]) / (levels - 1))
    tint = LinearSegmentedColormap.from_list("drawn", ["#000000", "#56b4e9", "#e8f6ff"])
    tiles[2:, :, rows_given:] = tint(completed.swapaxes(0, 1)[:, :, rows_given:] / (levels - 1))
    tiles[1, :, rows_given:, :, 3] = 0.12  # nothing is given there
    return _tiles(theme, tiles, ["original", "given", "drawn", *[""] * (completed.shape[1] - 1)])


def loss_curve(theme: Theme, train: Line, val: Line, best: tuple[float, float]) -> Figure:
    """Draw bits per level against the step, and mark the best evaluation."""
    figure, axes = _axes(theme, "bits per pixel")
    blue, orange, _ = theme.series
    axes.plot(train.x, train.y, color=orange, linewidth=1)
    axes.plot(val.x, val.y, color=blue, linewidth=2)
    axes.plot(*best, "o", color=blue, markersize=6, clip_on=False)
    axes.annotate(f"best {best[1]:.3f}", best, (0, 12), textcoords="offset points", color=blue, ha="right")
    low = min(*train.y, *val.y)
    high = np.percentile([*train.y, *val.y], 97)  # the first steps would flatten all the others
    axes.set_ylim(low - 0.05 * (high - low), high)
    axes.set_xlim(0, max(val.x))
    axes.set_xlabel("training step")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _name_lines(figure, axes, [train, val], [orange, blue])
    return figure


def _styles() -> Iterator[tuple[str, str, str]]:
    """Yield a colour, a marker and dashes for each line; the first 24 differ."""
    dashes = [kind for kind in ("-", "--", ":") for _ in MANY]
    return zip(cycle(MANY), cycle("osD^vPX*"), cycle(dashes))


def loss_curves(theme: Theme, title: str, lines: Sequence[Line], axis: str) -> Figure:
    """Draw losses against steps or seconds, with a legend, the line that ends highest first."""
    figure, axes = _axes(theme, title, (8, 4.2))
    for line, (colour, marker, dashes) in zip(lines, _styles(), strict=False):
        axes.plot(line.x, line.y, dashes, marker=marker, ms=4, lw=1.6, color=colour, label=line.name)
    axes.set_xlabel(axis)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _legend(theme, figure, _highest_first(axes, lines))
    return figure


def points(
    theme: Theme,
    title: str,
    names: Sequence[str],
    columns: Mapping[str, Sequence[tuple[float, float | None] | None]],
) -> Figure:
    """Draw values with their standard errors; each column has one value for each of `names`.

    An error may be None, and so may a value that is not known.
    """
    figure, axes = _axes(theme, title, (8, 4.2))
    for i, (name, (colour, marker, _)) in enumerate(zip(names, _styles(), strict=False)):
        known = {x: column[i] or (np.nan, None) for x, column in enumerate(columns.values())}
        axes.errorbar(
            list(known),
            [value for value, _ in known.values()],
            [error or 0.0 for _, error in known.values()],
            fmt=marker, color=colour, capsize=3, label=name,
        )  # fmt: skip
    axes.set_xticks(range(len(columns)), list(columns), rotation=30, ha="right")
    _legend(theme, figure)
    return figure


def against_position(theme: Theme, title: str, lines: Sequence[Line], tick: Callable[[float], str]) -> Figure:
    """Draw lines against the position on logarithmic axes, with `tick` writing the values."""
    figure, axes = _axes(theme, title)
    axes.set_yscale("log")
    axes.margins(y=0.15)
    for line, colour, marker in zip(lines, theme.series, "osD", strict=True):
        axes.plot(line.x, line.y, color=colour, marker=marker, markersize=4, linewidth=2)
    _scale(axes, lines, "position in the sequence (tokens)", tick, base=10)
    _name_lines(figure, axes, lines, theme.series)
    return figure


def against_size(
    theme: Theme,
    title: str,
    axis: str,
    lines: Sequence[Line],
    tick: Callable[[float], str],
    strong: Collection[str] = (),
) -> Figure:
    """Draw any number of lines against a size on logarithmic axes, with a legend, the highest line first.

    Those whose names are in `strong` are thicker.
    """
    figure, axes = _axes(theme, title, (8, 4.2))
    axes.set_yscale("log")
    for line, (colour, marker, dashes) in zip(lines, _styles(), strict=False):
        width = 2.6 if line.name in strong else 1.4
        axes.plot(
            line.x, line.y, dashes, marker=marker, ms=2 + width, lw=width, color=colour, label=line.name
        )
    _scale(axes, lines, axis, tick, base=2)
    _legend(theme, figure, _highest_first(axes, lines))
    return figure


def patterns(theme: Theme, panels: Mapping[str, NDArray[np.integer]]) -> Figure:
    """Draw which keys (columns) each query (row) attends to: `[T,S]` counts by the titles of the panels."""
    figure = Figure(figsize=(3.4 * len(panels), 3.6), facecolor=theme.paper, layout="constrained")
    shades = LinearSegmentedColormap.from_list("reads", [theme.paper, theme.series[0], theme.series[1]])
    for place, (title, reads) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), place + 1)
        axes.imshow(reads, cmap=shades, vmin=0, vmax=2, interpolation="nearest")
        axes.spines[:].set_color(theme.faint)
        axes.tick_params(color=theme.faint, labelcolor=theme.ink)
        axes.set_xlabel("key", color=theme.ink)
        axes.set_ylabel("query", color=theme.ink)
        axes.set_title(title, loc="left", fontsize=FONT_SIZE, color=theme.ink)
    return figure


def of_report(
    figures: Mapping[str, Any],
    real: Pixels,
    samples: Pixels,
    completed: Pixels,
) -> dict[str, dict[str, bytes]]:
    """Draw the pictures of the demo's report as PNG files, each as "light" and as "dark".

    Args:
        figures: the contents of `figures.json`.
        real: validation images [N, H, W].
        samples: images drawn by the model [N, H, W].
        completed: completions [N, K, H, W] of the first of the real images.
    """
    training, costs = figures["training"], figures["cost"]["contenders"]
    levels, rows_given = figures["samples"]["levels"], figures["completions"]["rows_given"]
    best = (training["best_step"], training["best_bits_per_dim"])
    train, val = (
        Line(name, *zip(*training[key], strict=True))
        for name, key in (("training", "train"), ("validation", "val"))
    )

    def cost_lines(quantity: str) -> list[Line]:
        return [
            Line(NAMES[name], [cost["position"] for cost in line], [cost[quantity] for cost in line])
            for name, line in costs.items()
        ]

    def draw(theme: Theme) -> dict[str, Figure]:
        return {
            "samples": digit_sheet(theme, samples, levels),
            "real": digit_sheet(theme, real[: len(samples)], levels),
            "completions": completion_sheet(theme, real[: len(completed)], completed, rows_given, levels),
            "loss": loss_curve(theme, train, val, best),
            "time": against_position(theme, "time per token", cost_lines("seconds"), brief_time),
            "memory": against_position(theme, "memory per sequence", cost_lines("nbytes"), size),
        }

    light, dark = draw(LIGHT), draw(DARK)
    return {name: {"light": png(light[name]), "dark": png(dark[name])} for name in light}


def _axes(theme: Theme, title: str, inches: tuple[float, float] = (5.6, 3.5)) -> tuple[Figure, Axes]:
    figure = Figure(figsize=inches, facecolor=theme.paper, layout="constrained")
    axes = figure.add_subplot(facecolor=theme.paper)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(theme.faint)
    axes.tick_params(which="both", color=theme.faint, labelcolor=theme.ink)
    axes.grid(color=theme.faint, linewidth=0.5)
    axes.xaxis.label.set_color(theme.ink)
    axes.set_title(title, loc="left", fontsize=FONT_SIZE, color=theme.ink)
    return figure, axes


def _legend(theme: Theme, figure: Figure, handles: Sequence[Artist] | None = None) -> None:
    text: Any = {"handles": handles, "labelcolor": theme.ink, "fontsize": FONT_SIZE - 1.5}
    figure.legend(loc="outside right upper", frameon=False, **text)


def _highest_first(axes: Axes, lines: Sequence[Line]) -> list[Artist]:
    """Return the drawn `lines`, the one that ends highest first."""
    order = sorted(range(len(lines)), key=lambda index: -lines[index].y[-1])
    return [axes.lines[i] for i in order]


def _scale(axes: Axes, lines: Sequence[Line], name: str, tick: Callable[[float], str], base: int) -> None:
    """Make the x axis logarithmic, with a tick at each size; `tick` writes the values of the y axis."""
    axes.set_xscale("log", base=base)
    sizes = sorted({x for line in lines for x in line.x})
    axes.set_xticks(sizes, [f"{x:,}" for x in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axes.set_xlabel(name)


def _name_lines(figure: Figure, axes: Axes, lines: Sequence[Line], colours: Sequence[str]) -> None:
    """Write each name next to the end of its line: on the right, moved up where names would overlap.

    A line that ends before the others is named above its end, so that its name does not cross them.
    """
    right = max(line.x[-1] for line in lines)
    lowest = -np.inf
    for line, colour in sorted(zip(lines, colours, strict=True), key=lambda pair: pair[0].y[-1]):
        end = (line.x[-1], line.y[-1])
        if line.x[-1] < 0.9 * right:
            offset, place = (-4.0, 6.0), {"ha": "right", "va": "bottom"}
        else:
            height = axes.transData.transform(end)[1] * 72 / figure.dpi  # points
            lowest = max(height, lowest + 1.4 * FONT_SIZE)
            offset, place = (6.0, lowest - height), {"ha": "left", "va": "center"}
        text: Any = {"color": colour, "fontsize": FONT_SIZE, "fontweight": "bold", **place}
        axes.annotate(line.name, end, offset, textcoords="offset points", annotation_clip=False, **text)


def _grey(levels: NDArray[np.floating]) -> NDArray[np.floating]:
    """[..., H, W] in [0, 1] to RGBA [..., H, W, 4]."""
    return np.stack([levels, levels, levels, np.ones_like(levels)], axis=-1)


def _tiles(theme: Theme, tiles: NDArray[np.floating], row_names: Sequence[str] = ()) -> Figure:
    """Draw RGBA tiles [rows, columns, H, W, 4] with transparent gaps, and the names left of the rows."""
    rows, columns, height, width, _ = tiles.shape
    tiles = np.pad(tiles, [(0, 0), (0, 0), (0, GAP), (0, GAP), (0, 0)])
    sheet = tiles.swapaxes(1, 2).reshape(rows * (height + GAP), columns * (width + GAP), 4)[:-GAP, :-GAP]
    margin = 11 if row_names else 0  # for the names, in pixels of the images
    inches = 5.6 / (sheet.shape[1] + margin)
    figure = Figure(figsize=(5.6, sheet.shape[0] * inches), facecolor=theme.paper)
    left = margin * inches / 5.6
    axes = figure.add_axes((left, 0, 1 - left, 1))
    axes.set_axis_off()
    axes.imshow(sheet, interpolation="nearest")
    for row, name in enumerate(row_names):
        middle = row * (height + GAP) + height / 2 - 0.5
        axes.text(-2, middle, name, ha="right", va="center", color=theme.ink, fontsize=9)
    return figure

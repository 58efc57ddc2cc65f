"""Sheets of images in PNG files: drawn from nothing, or completed from their first rows."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unrolled.cli._output import progress_bar, software
from unrolled.extras import how_to_install
from unrolled.files import write_file

SHOWN = 112  # minimum pixels of an image's longer side
COMPLETED = 8  # images of the validation split

Levels = npt.NDArray[np.int64]
Draw = Callable[..., list[Tensor]]
"""`unrolled.generation.generate`, with the model and the sampling options already set."""


def drawn(draw: Draw, shape: Sequence[int], count: int) -> Levels:
    """Draw a nearly square sheet of images, [rows, columns, *shape]; -1 where the last row is not full."""
    if count < 1:
        raise ValueError(f"--num-samples is {count}, but must be at least 1")
    size, columns = math.prod(shape), math.ceil(math.sqrt(count))
    with progress_bar("generating pixels", count * size) as advance:
        images = draw([[]], size, num_samples=count, on_token=lambda *_: advance())
    grid = np.full((math.ceil(count / columns) * columns, *shape), -1)
    grid[:count] = torch.stack(images).reshape(count, *shape).numpy()
    return grid.reshape(-1, columns, *shape)


def completed(draw: Draw, originals: Tensor, rows: int, count: int) -> Levels:
    """Complete images [N, *shape] from their first rows: [N, 2 + count, *shape].

    A row of the sheet holds the given part with -1 below it, then the completions, then the original.

    Raises:
        ValueError: `rows` gives no row of the images, or leaves no row to draw.
    """
    shape = originals.shape[1:]
    if not 1 <= rows < shape[0]:
        raise ValueError(
            f"--complete is {rows}, but must be from 1 to {shape[0] - 1}, the rows that are given"
        )
    given = originals[:, :rows].flatten(1).long()
    left = math.prod(shape) - given.shape[1]
    with progress_bar("generating pixels", len(given) * count * left) as advance:
        new = draw(given.tolist(), left, num_samples=count, on_token=lambda *_: advance())
    whole = torch.cat([given.repeat_interleave(count, dim=0), torch.stack(new)], dim=1)
    partial = originals.long().clone()
    partial[:, rows:] = -1
    parts = [partial[:, None], whole.reshape(len(given), count, *shape), originals.long()[:, None]]
    return torch.cat(parts, dim=1).numpy()


def write(images: Levels, levels: int, path: Path) -> None:
    """Write images [rows, columns, H, W] or [rows, columns, H, W, 3] as a PNG file.

    Args:
        images: levels from 0, which is black, to `levels` - 1. -1 stands for a missing level and is shown in
            grey, like the lines between the images.
        levels: number of levels.
        path: the file to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.image import imsave
    except ImportError as error:
        raise ImportError(f"images need matplotlib, which is missing: {how_to_install('plot')}") from error
    colours = images if images.ndim == 5 else np.repeat(images[..., None], 3, axis=-1)
    rows, columns, height, width, _ = colours.shape
    sheet = np.full((rows, columns, height + 1, width + 1, 3), -1)
    sheet[:, :, :-1, :-1] = colours
    sheet = sheet.swapaxes(1, 2).reshape(rows * (height + 1), -1, 3)
    shown = np.where(sheet < 0, 85, sheet * 255 // (levels - 1)).astype(np.uint8)
    zoom = math.ceil(SHOWN / max(height, width))
    shown = shown.repeat(zoom, axis=0).repeat(zoom, axis=1)
    write_file(path, lambda file: imsave(file, shown, format="png", metadata=software("generate")))

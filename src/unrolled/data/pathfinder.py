"""Pathfinder: are two points joined by a dashed line? (Linsley et al. 2018, arXiv 1805.08315)

The task of the Long Range Arena (arXiv 2011.04006, section 2.2.5), with another generator, so accuracies
cannot be compared with published ones. An image has two long dashed lines that do not touch, some short lines
to distract, and two discs. The discs are at both ends of one long line (label 1), or at one end of each long
line (label 0), and equally far apart in both cases. Between two dashes, a line turns by an angle drawn from a
normal distribution.
"""

import math
import random
from dataclasses import dataclass
from itertools import product
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge

from unrolled.contract import Batch
from unrolled.data._base import Task
from unrolled.data._drawn import DrawnDataset
from unrolled.fields import Count, Size

DASH, GAP = 2.0, 1.3
"""Length of a dash, and of the gap to the next one, in pixels."""
THICK, DISC = 0.55, 1.6
"""Radius of a line and of a disc, in pixels."""
CLEAR = 2.6
"""Least distance of a line from other lines, and from other parts of itself, in pixels."""
TURN = 0.35
"""Standard deviation of the angle between two dashes, in radians."""
SAME = 0.5
"""Largest difference, in pixels, between the distance of two discs and that of the ends of a line."""
ATTEMPTS = 400  # at placing a line, before the image is begun again
IMAGES = 200  # maximum number of images that are begun

Point = tuple[float, float]


@dataclass
class PathfinderDataset(DrawnDataset):
    """Unlimited random training images, and a fixed validation set; both labels are equally frequent.

    Attributes:
        size: pixels of a side of the image; a sequence has `size` x `size` grey levels.
        dashes: number of dashes of each of the two long lines, at least 2.
        distractors: number of short lines, which have a third as many dashes.
        val_size: examples of the validation set.

    Raises:
        ValueError: the lines do not fit into an image.
    """

    size: Size = 32
    dashes: Annotated[int, Ge(2)] = 6
    distractors: Count = 2
    val_size: Size = 1_000

    task: ClassVar[Task] = "labels"
    vocab_size: ClassVar[int] = 256
    n_classes: ClassVar[int] = 2

    @property
    def length(self) -> int:
        """Pixels of an image."""
        return self.size**2

    def _draw(self, rng: np.random.Generator, count: int) -> Batch:
        source = random.Random(int(rng.integers(2**63)))
        labels = torch.tensor([source.randrange(2) for _ in range(count)])
        images = np.stack([self._image(source, joined=bool(label)) for label in labels])
        return Batch(torch.from_numpy(images).flatten(1).long(), labels)

    def _image(self, source: random.Random, *, joined: bool) -> npt.NDArray[np.uint8]:
        for _ in range(IMAGES):
            lines = self._lines(source)
            discs = lines[0][0], lines[0][-1]
            if math.dist(*discs) >= 2 * CLEAR:  # as far apart as the ends of two lines are
                break
        if not joined:
            lines, discs = self._apart(source, math.dist(*discs))
        segments = [line[i : i + 2] for line in lines for i in range(0, len(line), 2)]
        return painted([*((p, q, THICK) for p, q in segments), *((p, p, DISC) for p in discs)], self.size)

    def _apart(self, source: random.Random, distance: float) -> tuple[list[list[Point]], tuple[Point, Point]]:
        """Draw lines, and choose an end of each long line such that the two are about `distance` apart.

        Otherwise the distance of the discs alone would tell the label in most cases.
        """
        for _ in range(IMAGES * math.ceil(self.size / 32) ** 2):  # the larger the image, the rarer a distance
            lines = self._lines(source)
            first, second = lines[:2]
            for pair in product((first[0], first[-1]), (second[0], second[-1])):
                if abs(math.dist(*pair) - distance) < SAME:
                    return lines, pair
        raise self._too_small()

    def _lines(self, source: random.Random) -> list[list[Point]]:
        """Draw the lines, the two long ones first; each line is a list of the ends of its dashes."""
        wanted = [self.dashes] * 2 + [max(1, self.dashes // 3)] * self.distractors
        for _ in range(IMAGES):
            lines: list[list[Point]] = []
            for dashes in wanted:
                for _ in range(ATTEMPTS):
                    if (line := self._line(source, dashes, lines)) is not None:
                        lines.append(line)
                        break
                else:
                    break
            else:
                return lines
        raise self._too_small()

    def _too_small(self) -> ValueError:
        return ValueError(
            f"size is {self.size}, too small for two lines of dashes = {self.dashes} with distractors = "
            f"{self.distractors}"
        )

    def _line(self, source: random.Random, dashes: int, others: list[list[Point]]) -> list[Point] | None:
        """Draw a line; None if it leaves the image, or comes too close to another one or to itself."""
        x, y = (source.uniform(DISC, self.size - 1 - DISC) for _ in range(2))
        angle = source.uniform(0, 2 * math.pi)
        near = [point for line in others for point in line]
        points: list[Point] = [(x, y)]
        while len(points) < 2 * dashes:
            step = DASH if len(points) % 2 else GAP
            x, y = x + step * math.cos(angle), y + step * math.sin(angle)
            points.append((x, y))
            if not len(points) % 2:
                angle += source.gauss(0, TURN)
        inside = all(DISC <= z <= self.size - 1 - DISC for point in points for z in point)
        apart = all(math.dist(p, q) >= 2 * CLEAR for p in (points[0], points[-1]) for q in near) and all(
            math.dist(p, q) >= CLEAR for p in points for q in near
        )
        simple = all(math.dist(p, q) >= CLEAR for i, p in enumerate(points) for q in points[i + 4 :])
        return points if inside and apart and simple else None


def painted(lines: list[tuple[Point, Point, float]], size: int) -> npt.NDArray[np.uint8]:
    """Return an image with lines from point to point, each with a radius, white on black with soft edges."""
    grid = np.arange(size, dtype=np.float64)
    x, y = grid[None, :], grid[:, None]
    image = np.zeros((size, size))
    for (x0, y0), (x1, y1), radius in lines:
        dx, dy = x1 - x0, y1 - y0
        along = ((x - x0) * dx + (y - y0) * dy) / max(dx * dx + dy * dy, 1e-12)
        along = along.clip(0, 1)
        distance = np.hypot(x - x0 - along * dx, y - y0 - along * dy)
        image = np.maximum(image, (radius + 0.5 - distance).clip(0, 1))
    shown: npt.NDArray[np.uint8] = np.rint(255 * image).astype(np.uint8)
    return shown

import math
import random

import numpy as np
import pytest
import torch

from unrolled.data.pathfinder import CLEAR, PathfinderDataset, painted


def test_lines_keep_apart_and_discs_are_as_far_apart_with_either_label():
    data, source = PathfinderDataset(val_size=1), random.Random(0)
    joined, apart = [], []
    for _ in range(300):
        lines = data._lines(source)
        assert [len(line) for line in lines] == [12, 12, 4, 4]
        points = [np.array(line) for line in lines]
        assert all(0 <= x <= 31 for line in points for x in line.flatten())
        for i, line in enumerate(points):
            for other in points[:i]:
                assert np.hypot(*(line[:, None] - other).T).min() >= CLEAR
                ends = line[[0, -1]][:, None] - other[[0, -1]]
                assert np.hypot(*ends.T).min() >= 2 * CLEAR  # so that discs do not touch
        joined.append(math.dist(lines[0][0], lines[0][-1]))
        lines, (a, b) = data._apart(source, joined[-1])
        assert {a, b} & {lines[0][0], lines[0][-1]}
        assert {a, b} & {lines[1][0], lines[1][-1]}
        apart.append(math.dist(a, b))
    assert np.abs(np.subtract(joined, apart)).max() < 0.5


def test_a_line_and_a_disc_are_painted_where_they_are():
    line = painted([((2.0, 3.0), (6.0, 3.0), 0.5)], 8)
    assert line[3].tolist() == [0, 0, 255, 255, 255, 255, 255, 0]
    assert line.sum() == 5 * 255
    disc = painted([((4.0, 4.0), (4.0, 4.0), 1.5)], 8)
    assert disc[4].tolist() == [0, 0, 0, 255, 255, 255, 0, 0]
    assert disc[3, 3] == round(255 * (2 - 2**0.5))


def test_labels_are_equally_frequent_and_images_differ():
    (batch,) = PathfinderDataset(size=24, dashes=4, val_size=400).eval_batches(400)
    assert batch.inputs.shape == (400, 576)
    assert 160 < int(batch.targets.sum()) < 240  # 200, 10 at one sigma
    assert len(torch.unique(batch.inputs, dim=0)) == 400


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dashes"), [(128, 6), (96, 14), (32, 2)])
def test_large_images_and_short_lines_are_drawn(size, dashes):
    dataset = PathfinderDataset(size=size, dashes=dashes, val_size=20)
    for step in range(2):
        inputs, labels, *_ = dataset.batch("train", step=step, batch_size=16, seed=0)
        assert inputs.shape == (16, size**2)
        assert 0 < labels.sum() < 16


def test_a_line_of_one_dash_is_refused():
    with pytest.raises(ValueError, match="dashes is 1, but must be an integer of at least 2"):
        PathfinderDataset(dashes=1)


def test_lines_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="size is 12, too small for two lines of dashes = 9"):
        PathfinderDataset(size=12, dashes=9)

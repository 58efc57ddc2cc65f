"""Fourier features: the definition on a grid, and what they are for."""

import math

import pytest
import torch

from unrolled.ops.positions import fourier_features, grid_positions


def test_a_grid_runs_from_minus_one_to_one_on_each_axis():
    places = grid_positions([3, 5])
    assert places.shape == (3, 5, 2)
    assert places[:, 0, 0].tolist() == [-1, 0, 1]
    assert places[0, :, 1].tolist() == [-1, -0.5, 0, 0.5, 1]
    assert grid_positions([2, 3, 4, 5]).shape == (2, 3, 4, 5, 4)


def test_the_features_of_each_axis_are_sines_cosines_and_the_coordinate():
    x, y = 0.3, -0.8
    features = fourier_features(torch.tensor([x, y], dtype=torch.float64), 3, [10, 4], dtype=torch.float64)
    expected = []
    for value, frequencies in ((x, [1, 3, 5]), (y, [1, 1.5, 2])):  # evenly from 1 to mu / 2
        expected += [math.sin(f * math.pi * value) for f in frequencies]
        expected += [math.cos(f * math.pi * value) for f in frequencies]
        expected.append(value)
    torch.testing.assert_close(features, torch.tensor(expected, dtype=torch.float64), atol=1e-15, rtol=1e-12)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("n_bands", [1, 2, 64])
def test_the_width_for_any_number_of_axes_and_bands(axes, n_bands):
    features = fourier_features(grid_positions([3] * axes), n_bands, [224] * axes)
    assert features.shape == (*[3] * axes, axes * (2 * n_bands + 1))
    assert features.dtype == torch.float32


def test_no_two_points_of_a_large_grid_look_alike():
    features = fourier_features(grid_positions([1000]), 8, [1000])
    assert torch.cdist(features, features).fill_diagonal_(1).min() > 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(4, 2), 3, [5]), r"resolution has 1 axes, but positions \[4, 2\] 2"),
        ((torch.zeros(4, 2), 0, [5, 5]), "n_bands is 0, but must be at least 1"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        fourier_features(*arguments)

"""How fast an estimate made of random features approaches what it estimates."""

import math

import torch

SIZES = [64, 128, 256, 512, 1024]
"""Numbers of features."""

SEEDS = range(24)


def assert_monte_carlo_rate(estimate, expected):
    """The error of `estimate(n_features, seed)` falls like n^(-1/2).

    A straight line is fitted to log(error) over log(n) for each seed. The mean slope may differ from -1/2 by four
    of its standard errors, which the scatter of the seeds gives; that band must exclude -1/4 and -1.
    """
    x = torch.tensor(SIZES, dtype=torch.float64).log()
    errors = torch.tensor(
        [[float((estimate(n, seed) - expected).norm()) for n in SIZES] for seed in SEEDS], dtype=torch.float64
    )
    x = x - x.mean()
    slopes = (errors.log() * x).sum(1) / x.square().sum()
    slope, scatter = float(slopes.mean()), 4 * float(slopes.std()) / math.sqrt(len(slopes))
    assert scatter < 0.25, f"a slope of {slope:.3f} +- {scatter:.3f} says nothing"
    assert abs(slope + 0.5) <= scatter, f"the slope is {slope:.3f} +- {scatter:.3f}, should be -0.5"
    return slope, scatter


def assert_mean(samples, expected):
    """The mean of independent samples (first axis) is `expected`, within five of its standard errors."""
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - expected).abs() <= 5 * error).all()

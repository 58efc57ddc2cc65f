"""The optimiser, AdamW or RAdam, and its learning-rate schedule."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from unrolled.training.config import TrainConfig

PLATEAU_FACTOR = 0.5
PLATEAU_PATIENCE = 3
"""Evaluations in a row without a new lowest loss before the plateau schedule lowers the rate."""


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: TrainConfig
) -> torch.optim.Optimizer:
    """Make the optimiser of a model, with weight decay on matrices only.

    Decay shrinks directions of a linear map; on a bias or a norm's gain it would shrink an offset or a scale.
    Parameters are passed by name, so that the state can be checkpointed by name.
    """
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    groups = [
        {"params": [(n, p) for n, p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [(n, p) for n, p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    lr, betas, eps = config.lr, config.betas, config.eps
    if config.optimizer == "radam":
        return torch.optim.RAdam(groups, lr=lr, betas=betas, eps=eps, decoupled_weight_decay=True)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)


@dataclass
class ScheduleState:
    """The state of a schedule.

    Attributes:
        scale: factor that the plateau schedule has applied to the learning rate so far.
        best: lowest validation loss seen.
        stale: evaluations since then, or since the rate was last lowered.
    """

    scale: float = 1.0
    best: float | None = None
    stale: int = 0


class Schedule:
    """The learning rate of each update.

    With `s` the updates already done, `w` warm-up steps and `n` steps in the run:

        s < w          peak * (s + 1) / w
        cosine         min_lr + (lr - min_lr) * (1 + cos(pi * (s - w) / (n - w))) / 2
        plateau        peak = max(min_lr, lr * 0.5^k), k = how often the validation loss stopped falling
        constant       lr
        inverse_sqrt   lr * sqrt(w / (s + 1))

    Only the plateau schedule has state, which `observe` updates. With lr = (d_model w)^-0.5, the
    last one is d_model^-0.5 min((s + 1)^-0.5, (s + 1) w^-1.5), the rate of Vaswani et al. 2017 (arXiv
    1706.03762, eq. 3), which the code of its authors calls "noam".
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.state = ScheduleState()

    def lr(self, step: int) -> float:
        """Learning rate of the update that follows `step` finished ones."""
        c = self.config
        peak = max(c.min_lr, c.lr * self.state.scale)
        if step < c.warmup_steps:
            return peak * (step + 1) / c.warmup_steps
        if c.schedule == "cosine":
            done = (step - c.warmup_steps) / max(1, c.steps - c.warmup_steps)
            return c.min_lr + (c.lr - c.min_lr) * (1 + math.cos(math.pi * done)) / 2
        if c.schedule == "inverse_sqrt":
            return peak * math.sqrt(c.warmup_steps / (step + 1))
        return peak

    def observe(self, val_loss: float) -> None:
        """Update the plateau schedule with a validation loss; other schedules ignore it."""
        if self.config.schedule != "plateau":
            return
        s = self.state
        if s.best is None or val_loss < s.best:
            s.best, s.stale = val_loss, 0
            return
        s.stale += 1
        if s.stale == PLATEAU_PATIENCE:
            s.scale, s.stale = s.scale * PLATEAU_FACTOR, 0

"""The optimisers, AdamW, RAdam and Muon, and the learning-rate schedule."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from unrolled.contract import UnsupportedError
from unrolled.ops.checks import wrong
from unrolled.training.config import TrainConfig
from unrolled.training.interfaces import Trainable

PLATEAU_FACTOR = 0.5
PLATEAU_PATIENCE = 3
"""Evaluations in a row without a new lowest loss before the plateau schedule lowers the rate."""


Named = list[tuple[str, nn.Parameter]]


def build_optimizers(model: Trainable, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Make the optimisers of a model, with weight decay on matrices only.

    On a matrix, decay shrinks directions of a linear map. On a bias or the gain of a norm, it would shrink an
    offset or a scale. A module whose offsets or scales have two axes, such as those of heads, names them in
    its attribute `not_decayed`. Parameters are passed by name, so that the state can be checkpointed by name.

    Raises:
        ValueError: all parameters are frozen, or the optimiser is Muon, but no block of the model has a
            linear layer.
        UnsupportedError: the optimiser is Muon, which this version of torch does not have.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError("the model has nothing to train: all of its parameters are frozen")
    matrices = _matrices_of_blocks(model, trained) if config.optimizer == "muon" else []
    orthogonal = {name for name, _ in matrices}
    rest = [(name, p) for name, p in trained if name not in orthogonal]
    kept = _not_decayed(model)
    groups = [
        {"params": [(n, p) for n, p in rest if n not in kept], "weight_decay": config.weight_decay},
        {"params": [(n, p) for n, p in rest if n in kept], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    lr, betas, eps = config.lr, config.betas, config.eps
    if config.optimizer == "radam":
        return [torch.optim.RAdam(groups, lr=lr, betas=betas, eps=eps, decoupled_weight_decay=True)]
    optimizers: list[torch.optim.Optimizer] = []
    if groups:
        fused = all(_may_fuse(p) for _, p in rest)
        optimizers.append(torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused))
    if matrices:
        from unrolled.training.muon import Muon

        muon = Muon(matrices, lr=lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    return optimizers


def _not_decayed(model: Trainable) -> set[str]:
    """Return the names of the parameters without weight decay."""
    named = {
        id(getattr(module, name)) for module in model.modules() for name in getattr(module, "not_decayed", ())
    }
    return {name for name, p in model.named_parameters() if p.ndim < 2 or id(p) in named}


def _may_fuse(p: nn.Parameter) -> bool:
    """Whether torch's fused AdamW can update a parameter.

    Fused AdamW walks through the memory of the parameter, its gradient and its moments side by side, and
    ignores strides. Autograd gives a contiguous parameter contiguous gradients.
    """
    return p.is_floating_point() and p.device.type in ("cpu", "cuda") and p.is_contiguous()


def _matrices_of_blocks(model: Trainable, trained: Named) -> Named:
    if not hasattr(torch.optim, "Muon"):
        raise UnsupportedError("optimizer 'muon' needs torch 2.9 or newer; use 'adamw'")
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    found = [(name, p) for name, p in trained if id(p) in linear and "blocks." in name]
    if not found:
        raise wrong("optimizer", "'muon'", "'adamw' or 'radam' for a model without blocks of linear layers")
    return found


@dataclass
class ScheduleState:
    """The state of a schedule.

    Attributes:
        scale: factor that the plateau schedule has applied to the learning rate so far.
        best: lowest validation loss seen.
        stale: number of evaluations since the lowest loss, or since the rate was last lowered.
    """

    scale: float = 1.0
    best: float | None = None
    stale: int = 0


class Schedule:
    """The learning rate of each update.

    With `s` the updates already done, `w` warm-up steps, `n` steps in the run, and peak = lr unless said
    otherwise:

        s < w          peak * (s + 1) / w
        cosine         min_lr + (lr - min_lr) * (1 + cos(pi * d)) / 2, d = (s - w) / (n - w), or the part of
                       `seconds` that has passed
        plateau        peak = max(min_lr, lr * 0.5^k), k = how often 3 evaluations brought no new lowest loss
        constant       lr
        inverse_sqrt   lr * sqrt(w / (s + 1))

    Only the plateau schedule has state, which `observe` updates. With lr = (d_model w)^-0.5, inverse_sqrt is
    d_model^-0.5 min((s + 1)^-0.5, (s + 1) w^-1.5), the rate of Vaswani et al. 2017 (arXiv 1706.03762, eq. 3),
    which the code of its authors calls "noam".
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.state = ScheduleState()

    def lr(self, step: int, seconds: float = 0.0) -> float:
        """Return the learning rate of the update after `step` finished updates and `seconds` of the run."""
        c = self.config
        peak = max(c.min_lr, c.lr * self.state.scale)
        if step < c.warmup_steps:
            return peak * (step + 1) / c.warmup_steps
        if c.schedule == "cosine":
            done = (step - c.warmup_steps) / max(1, c.steps - c.warmup_steps)
            if c.seconds is not None:
                done = min(1.0, seconds / c.seconds)
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

"""What a training run is: one dataclass, checked when it is made."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

Optimizer = Literal["radam", "adamw"]
MOST = 2**63 - 1  # that torch and islice take
MOST_THREADS = 1024  # beyond, the system refuses to start them, in the middle of the work
Decay = Literal["cosine", "plateau", "constant", "inverse_sqrt"]


@dataclass(frozen=True)
class TrainConfig:
    """The settings of `train`. The defaults suit a small model on a few CPU cores.

    Attributes:
        steps: optimiser updates in the whole run.
        batch_size: examples per micro-batch; an update sees `batch_size * accumulate` examples.
        lr: peak learning rate.
        min_lr: where the cosine ends and where the plateau schedule stops halving.
        optimizer: "adamw" (Loshchilov & Hutter 2019) or "radam" (Liu et al. 2020, with decoupled decay).
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: applied to tensors of two or more dimensions, never to biases and norms.
        warmup_steps: updates over which the rate rises linearly to `lr`.
        schedule: what follows the warm-up: "cosine" down to `min_lr` at `steps`, "plateau" (halve when the
            validation loss stops falling), "constant", or "inverse_sqrt" (of the number of updates; see
            `unrolled.training.optim.Schedule`).
        clip_norm: largest norm of the whole gradient; None leaves it alone.
        accumulate: micro-batches per update.
        bf16: run forward passes under bfloat16 autocast; weights and optimiser stay as they are.
        gradient_checkpointing: recompute activations in the backward pass to save memory.
        eval_every: updates between two evaluations; the last update is always followed by one.
        eval_batches: validation batches per evaluation; None takes the whole split.
        checkpoint_every: updates between two checkpoints, which is the most that a killed run loses.
        log_every: updates per line of training loss in the log.
        seed: of the data order and of dropout.
        redraw_every: updates after which random features (`performer`, `rfa`) get other rows; None keeps the
            first ones.
        threads: CPU threads of torch; None leaves them as they are.

    Raises:
        ValueError: a value is of the wrong type or out of range.
    """

    steps: int = 2000
    batch_size: int = 16
    lr: float = 1e-3
    min_lr: float = 0.0
    optimizer: Optimizer = "adamw"
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    warmup_steps: int = 100
    schedule: Decay = "cosine"
    clip_norm: float | None = 1.0
    accumulate: int = 1
    bf16: bool = False
    gradient_checkpointing: bool = False
    eval_every: int = 250
    eval_batches: int | None = None
    checkpoint_every: int = 250
    log_every: int = 10
    seed: int = 0
    threads: int | None = None
    eps: float = 1e-8
    redraw_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "eval_every", "checkpoint_every", "log_every"):
            _whole(name, getattr(self, name), least=1)
        for name in ("warmup_steps", "seed"):
            _whole(name, getattr(self, name), least=0)
        for name in ("eval_batches", "redraw_every", "threads"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), least=1)
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ValueError(f"threads is {self.threads}, but must be at most {MOST_THREADS}")
        for name in ("bf16", "gradient_checkpointing"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}, but must be true or false")
        _one_of("optimizer", self.optimizer, get_args(Optimizer))
        _one_of("schedule", self.schedule, get_args(Decay))

        _number("lr", self.lr, "a number above 0", lambda x: x > 0)
        _number("min_lr", self.min_lr, f"a number from 0 to lr = {self.lr}", lambda x: 0 <= x <= self.lr)
        _number("eps", self.eps, "a number above 0", lambda x: x > 0)
        _number("weight_decay", self.weight_decay, "a number of at least 0", lambda x: x >= 0)
        if self.clip_norm is not None:
            _number("clip_norm", self.clip_norm, "a number above 0, or none", lambda x: x > 0)
        if self.schedule == "inverse_sqrt" and self.warmup_steps == 0:
            raise ValueError("warmup_steps is 0, but must be at least 1 with the schedule inverse_sqrt")
        if not isinstance(self.betas, list | tuple) or len(self.betas) != 2:
            raise ValueError(f"betas is {self.betas!r}, but must be two numbers")
        for beta in self.betas:
            _number("betas", beta, "two numbers from 0 to below 1", lambda x: 0 <= x < 1)
        object.__setattr__(self, "betas", tuple(self.betas))  # a list in YAML and JSON

    def free_on_resume(self) -> frozenset[str]:
        """Name the fields that a resumed run may change, since they do not change what the weights become.

        `threads` and `gradient_checkpointing` change at most the rounding. `steps` bends the cosine, and the
        plateau schedule reacts at each evaluation, so those hold `steps` and `eval_every` fast.
        `eval_batches` is held because the best loss so far must stay comparable.
        """
        free = {"checkpoint_every", "log_every", "threads", "gradient_checkpointing"}
        if self.schedule != "cosine":
            free.add("steps")
        if self.schedule != "plateau":
            free.add("eval_every")
        return frozenset(free)


def _whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, but must be a whole number of at least {least}")
    if value > MOST:
        raise ValueError(f"{name} is {value}, but must be at most {MOST}")


def _number(name: str, value: Any, wanted: str, holds: Callable[[float], bool]) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not holds(value):
        raise ValueError(f"{name} is {value!r}, but must be {wanted}")


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(choices)}")

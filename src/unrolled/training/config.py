"""The settings of a training run."""

import time
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from unrolled.fields import Checked, Count, Fraction, Positive, Size

Optimizer = Literal["adamw", "radam", "muon"]
Decay = Literal["cosine", "plateau", "constant", "inverse_sqrt"]
MAX_THREADS = 1024  # the system cannot start more, and fails only after the work has begun


@dataclass(frozen=True)
class TrainConfig(Checked):
    """The settings of `train`. The defaults suit a small model on a few CPU cores.

    Attributes:
        steps: optimiser updates in the whole run.
        seconds: train for this long instead of for `steps` updates: the time of the whole run, with its
            evaluations and checkpoints, but without the last ones. The cosine follows the time. How many
            updates such a run makes depends on the machine, so that two runs do not end equal.
        clock: what `seconds` counts: "wall", or "cpu", the time that the cores have worked for the process,
            all threads added up, so that other work on the machine hardly shortens a run.
        batch_size: examples per micro-batch; an update sees `batch_size * accumulate` examples, on however
            many processes.
        lr: peak learning rate.
        min_lr: where the cosine ends and where the plateau schedule stops halving.
        optimizer: "adamw" (Loshchilov & Hutter 2019), "radam" (Liu et al. 2020, with decoupled decay) or
            "muon" (Jordan et al. 2024), which trains the linear layers of the blocks, and everything else by
            "adamw". Its updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982, section
            2.2), so that both take the same `lr`.
        betas: decay rates of the first and second moment, of "adamw" and "radam".
        eps: added to the root of the second moment.
        weight_decay: applied to tensors of two or more dimensions, never to biases and norms.
        warmup_steps: updates over which the rate rises linearly to `lr`.
        schedule: what follows the warm-up: "cosine" down to `min_lr` at `steps`, "plateau" (halve when the
            validation loss stops falling), "constant", or "inverse_sqrt" (of the number of updates; see
            `unrolled.training.optim.Schedule`).
        ema: decay of an exponential moving average of the weights, which is what is evaluated and saved as
            the best. After n updates the decay is at most (1 + n) / (10 + n), so that the first weights are
            soon forgotten. None evaluates and saves the weights themselves.
        clip_norm: largest norm of the whole gradient; None leaves it alone.
        accumulate: micro-batches per update.
        bf16: run forward passes under bfloat16 autocast; weights and optimiser stay as they are.
        gradient_checkpointing: recompute activations in the backward pass to save memory.
        compile: compile the blocks of the model by `torch.compile` when they first run; not together with
            `segment`, `carry_state` or `sequence`. Needs a C++ compiler, on a GPU Triton.
        eval_every: updates between two evaluations; the last update is always followed by one.
        eval_batches: validation batches per evaluation; None takes the whole split.
        checkpoint_every: updates between two checkpoints, which is the most that a killed run loses.
        log_every: updates per line of training loss in the log.
        seed: of the data order and of dropout.
        segment: read longer sequences in segments of this many tokens, with the gradient of the whole
            sequence: in the memory of one segment and the time of another forward pass. If the state of the
            model grows, one for each segment is kept in a temporary file. None reads sequences whole. See
            `unrolled.training.segments`.
        carry_state: start rows of a batch that read on where those of the batch before ended from the state
            there, without a gradient to it (`unrolled.training.carrying`). The data set must be one of such
            rows, as with `data.order=consecutive`.
        redraw_every: updates after which random features (`performer`, `rfa`) and rotations (`reformer`) are
            drawn anew; None keeps the first ones.
        threads: CPU threads of torch; None leaves them as they are.
        shard: processes over which one copy of the weights, gradients and optimiser is spread (FSDP2); there
            are as many copies as it divides the number of processes. 1 keeps a whole copy on each (DDP).
        sequence: processes that share each sequence, of which every one reads a slice
            (`unrolled.training.slices`). `segment` counts the tokens of all of them.

    Raises:
        ValueError: a value has another type or is out of range, or values do not fit each other.
    """

    steps: Size = 2000
    seconds: Positive | None = None
    clock: Literal["wall", "cpu"] = "wall"
    batch_size: Size = 16
    lr: Positive = 1e-3
    min_lr: Annotated[float, Ge(0)] = 0.0
    optimizer: Optimizer = "adamw"
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    weight_decay: Annotated[float, Ge(0)] = 0.1
    warmup_steps: Count = 100
    schedule: Decay = "cosine"
    ema: Annotated[float, Gt(0), Lt(1)] | None = None
    clip_norm: Positive | None = 1.0
    accumulate: Size = 1
    bf16: bool = False
    gradient_checkpointing: bool = False
    eval_every: Size = 250
    eval_batches: Size | None = None
    checkpoint_every: Size = 250
    log_every: Size = 10
    seed: Count = 0
    threads: Annotated[int, Ge(1), Le(MAX_THREADS)] | None = None
    eps: Positive = 1e-8
    redraw_every: Size | None = None
    segment: Size | None = None
    shard: Size = 1
    carry_state: bool = False
    sequence: Size = 1
    compile: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.betas, list):  # from YAML or JSON
            object.__setattr__(self, "betas", tuple(self.betas))
        super().__post_init__()
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr is {self.min_lr}, but must be at most lr = {self.lr}")
        if self.schedule == "inverse_sqrt" and self.warmup_steps == 0:
            raise ValueError("warmup_steps is 0, but must be at least 1 with schedule 'inverse_sqrt'")
        if self.compile and (self.segment is not None or self.carry_state or self.sequence > 1):
            raise ValueError(
                "compile is True, but must be False with segment, carry_state or sequence above 1"
            )

    def is_over(self, step: int, seconds: float) -> bool:
        """Return whether a run ends after so many updates and seconds."""
        return step >= self.steps if self.seconds is None else seconds >= self.seconds

    def now(self) -> float:
        """Return the seconds of `clock`; only differences mean something."""
        return time.process_time() if self.clock == "cpu" else time.perf_counter()

    def free_on_resume(self) -> frozenset[str]:
        """Name the fields that a resumed run may change, since they do not change what the weights become.

        `threads`, `gradient_checkpointing`, `compile`, `segment`, `shard` and `sequence` change at most the
        rounding.
        `steps`, `seconds` and `clock` bend the cosine, and the plateau schedule reacts at each evaluation, so
        those hold them and `eval_every` fast. `eval_batches` is held because the best loss so far must stay
        comparable.
        """
        free = {"checkpoint_every", "log_every", "threads", "gradient_checkpointing"}
        free |= {"compile", "segment", "shard", "sequence"}
        if self.schedule != "cosine":
            free |= {"steps", "seconds", "clock"}
        if self.schedule != "plateau":
            free.add("eval_every")
        return frozenset(free)

"""The settings of a training run."""

import time
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from unrolled.fields import Checked, Count, Fraction, Positive, Size
from unrolled.threads import MAX_THREADS

Optimizer = Literal["adamw", "radam", "muon"]
Decay = Literal["cosine", "plateau", "constant", "inverse_sqrt"]


@dataclass(frozen=True)
class TrainConfig(Checked):
    """The settings of `train`. The defaults suit a small model on a few CPU cores.

    Attributes:
        steps: optimiser updates in the whole run.
        seconds: train for this many seconds instead of for `steps` updates. This includes the
            time of evaluations and checkpoints, except the last ones. The cosine schedule follows the time.
            The number of updates depends on the machine, so two such runs do not end with equal weights.
        clock: the clock of `seconds`: "wall", or "cpu", which is the CPU time of the process, summed over all
            threads, so that other work on the machine hardly shortens a run.
        batch_size: examples per micro-batch; an update sees `batch_size * accumulate` examples, whatever the
            number of processes.
        lr: peak learning rate.
        min_lr: learning rate at the end of the cosine schedule, and lowest rate of the plateau schedule.
        optimizer: "adamw" (Loshchilov & Hutter 2019), "radam" (Liu et al. 2020, with decoupled decay) or
            "muon" (Jordan et al. 2024). Muon trains the linear layers of the blocks, and AdamW everything
            else. The updates of Muon are scaled to the size of those of AdamW (Liu et al. 2025, arXiv
            2502.16982, section 2.2), so that both take the same `lr`.
        betas: decay rates of the first and second moment, for AdamW and RAdam.
        eps: added to the root of the second moment, for AdamW and RAdam.
        weight_decay: applied to matrices, embeddings and convolutions, never to biases and norms.
        warmup_steps: updates over which the learning rate rises linearly to `lr`.
        schedule: learning rate after the warm-up: "cosine" falls to `min_lr` at `steps`, "plateau" is halved
            when three evaluations in a row bring no new lowest loss, "constant" stays at `lr`, and
            "inverse_sqrt" falls with the inverse root of the number of updates (see
            `unrolled.training.optim.Schedule`).
        ema: decay of an exponential moving average of the weights. The average is then evaluated and saved in
            place of the weights. After n updates, the decay is at most (1 + n) / (10 + n), so that the first
            weights are soon forgotten. None evaluates and saves the weights themselves.
        clip_norm: largest norm of the whole gradient; larger gradients are scaled down to it. None does not
            clip.
        accumulate: micro-batches per update.
        bf16: run forward passes under bfloat16 autocast; weights and optimiser keep their dtype.
        gradient_checkpointing: recompute activations in the backward pass to save memory.
        compile: compile the blocks of the model by `torch.compile` when they first run; not together with
            `segment`, `carry_state` or `sequence`. Needs a C++ compiler, or Triton on a GPU.
        eval_every: updates between two evaluations; the last update is always followed by one.
        eval_batches: validation batches per evaluation; None takes the whole split.
        checkpoint_every: updates between two checkpoints; a killed run loses at most this many.
        log_every: updates per line of training loss in the log.
        seed: seed of the data order and of dropout; `unrolled train` also draws the initial weights with it.
        segment: read longer sequences in segments of this many tokens. The gradient is that of the whole
            sequence. This takes the memory of one segment, and the time of another forward pass. The states
            between segments are kept in a temporary file. None reads sequences whole. See
            `unrolled.training.segments`.
        carry_state: start a row that continues the same row of the previous batch from the state at the end
            of that row. No gradient flows into this state (`unrolled.training.carrying`). The rows of the
            data set must continue from batch to batch, as with `data.order=consecutive`.
        redraw_every: redraw random features (`performer`, `rfa`), rotations (`reformer`) and the projections
            of hashes (`clustered`) after this many updates; None never redraws them.
        threads: number of CPU threads of torch; None leaves it as it is.
        shard: number of processes over which one copy of the weights, gradients and optimiser is spread
            (FSDP2). The number of copies is the number of processes divided by `shard`. 1 keeps a whole copy
            on each process (DDP).
        sequence: number of processes that share each sequence; each of them reads a slice of it
            (`unrolled.training.slices`). `segment` counts the tokens of all of them together.

    Raises:
        ValueError: a value has another type or is out of range, or two values contradict each other.
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
        if self.carry_state and self.redraw_every is not None:
            raise ValueError(
                "carry_state is True, but must be False with redraw_every: sums of the old features cannot "
                "continue with the new ones"
            )
        if self.compile and (self.segment is not None or self.carry_state or self.sequence > 1):
            raise ValueError(
                "compile is True, but must be False with segment, carry_state or sequence above 1"
            )

    def is_over(self, step: int, seconds: float) -> bool:
        """Return whether a run ends after so many updates and seconds."""
        return step >= self.steps if self.seconds is None else seconds >= self.seconds

    def now(self) -> float:
        """Return the time of `clock` in seconds; only differences between two calls have a meaning."""
        return time.process_time() if self.clock == "cpu" else time.perf_counter()

    def free_on_resume(self) -> frozenset[str]:
        """Name the fields that a resumed run may change, since they do not change the final weights.

        `threads`, `gradient_checkpointing` and `compile` change at most the rounding; `segment`, `shard` and
        `sequence` also change what dropout removes. `steps`, `seconds` and `clock` change the cosine
        schedule, so they must not change with it, and `eval_every` must not change with the plateau schedule,
        which reacts to each evaluation. `eval_batches` must not change because the best loss so far must stay
        comparable.
        """
        free = {"checkpoint_every", "log_every", "threads", "gradient_checkpointing"}
        free |= {"compile", "segment", "shard", "sequence"}
        if self.schedule != "cosine":
            free |= {"steps", "seconds", "clock"}
        if self.schedule != "plateau":
            free.add("eval_every")
        return frozenset(free)

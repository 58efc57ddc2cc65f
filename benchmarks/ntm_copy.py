"""Train a Neural Turing Machine to copy up to 20 vectors of 8 bits, and see how it copies longer sequences.

    python benchmarks/ntm_copy.py              # train, or go on where it stopped, then tell
    python benchmarks/ntm_copy.py --compile    # the same about three times as fast; needs a C++ compiler
    python benchmarks/ntm_copy.py --tell       # tell what is there, train nothing

Results are kept in runs/ntm-copy: table.md, curve.png and memory.png, the machine's heads while it copies.
Lengths grow during training: up to 5 at first, then up to 10, then up to 20, uniformly drawn. What is judged
are the weights at the end.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from unrolled import models
from unrolled.bench import plots
from unrolled.bench.report import table
from unrolled.data import Batch
from unrolled.data.copy_bits import CopyBitsDataset
from unrolled.models import NTMModel, NTMModelConfig
from unrolled.training import TrainConfig, read_log, train

OUT = Path("runs/ntm-copy")
LENGTHS = (10, 20, 30, 50, 100)
SEQUENCES = 100  # of each length, to judge by
STAGES = {1_500: 5, 3_500: 10, 6_000: 20}  # until this step, sequences up to this length
MODEL = NTMModelConfig(input_size=10, output_size=8, cell_options={"controller": "feedforward"})
BUDGET = TrainConfig(
    steps=max(STAGES),
    batch_size=16,
    lr=2e-3,
    weight_decay=0.0,
    min_lr=1e-4,
    clip_norm=1.0,
    eval_every=500,
    checkpoint_every=500,
    log_every=50,
)


class Growing:
    """The copy task with sequences that grow, to train on, and of length 20, for the log."""

    def __init__(self) -> None:
        self.stages = {until: CopyBitsDataset(max_length=n, val_size=1) for until, n in STAGES.items()}
        self.judged = CopyBitsDataset(min_length=20, val_size=16)

    def batch(self, split: Any, *, step: int, batch_size: int, seed: int) -> Batch:
        """Return the batch of one step, from the stage that it falls into."""
        dataset = next(dataset for until, dataset in self.stages.items() if step < until)
        return dataset.batch(split, step=step, batch_size=batch_size, seed=seed)

    def eval_batches(self, batch_size: int) -> Any:
        """Yield the sequences of length 20."""
        return self.judged.eval_batches(batch_size)


def main() -> None:
    """Train what is missing, then tell all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tell", action="store_true", help="train nothing")
    parser.add_argument("--compile", action="store_true", help="compile the step of the machine")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if not chosen.tell:
        torch.manual_seed(0)
        model = NTMModel(MODEL)
        if chosen.compile:
            layer: Any = model.stack.layers[0]
            layer._turn = torch.compile(layer._turn, dynamic=False)
        train(model, Growing(), BUDGET, OUT, progress=sys.stdout.isatty())
        model.save(OUT)  # the last weights: the best at length 20 may never have seen it
    model = models.load(OUT)
    assert isinstance(model, NTMModel)
    wrong = {n: wrong_bits(model, n) for n in LENGTHS}
    rows = [[str(n), f"{bits:.2f}", f"{bits / (8 * n):.3%}"] for n, bits in wrong.items()]
    told = table(["vectors", "wrong bits per sequence", "of all bits"], rows)
    count = sum(p.numel() for p in model.parameters())
    text = f"{told}\n\n{count:,} parameters, {SEQUENCES} sequences of each length"
    print(text)
    (OUT / "table.md").write_text(text + "\n")
    draw_curve(wrong).savefig(OUT / "curve.png", dpi=150)
    draw_memory(model).savefig(OUT / "memory.png", dpi=150)


def examples(n: int, count: int) -> Batch:
    """Draw sequences of a length, always the same, that were not trained on."""
    return next(CopyBitsDataset(min_length=n, max_length=n, val_size=count).eval_batches(count))


def wrong_bits(model: NTMModel, n: int) -> float:
    """Return the mean number of wrong bits of a sequence of n vectors."""
    return model.wrong_bits(*examples(n, SEQUENCES)).float().mean().item()


def draw_curve(wrong: dict[int, float]) -> Figure:
    """Draw the training loss, and the wrong bits against the length."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    losses, bits = figure.subplots(1, 2)
    trained = [entry for entry in read_log(OUT / "log.jsonl") if entry["event"] == "train"]
    steps = [entry["step"] * BUDGET.batch_size / 1000 for entry in trained]
    losses.plot(steps, [max(entry["loss"], 1e-7) for entry in trained], color="#0072b2", linewidth=1)
    for until in list(STAGES)[:-1]:
        losses.axvline(until * BUDGET.batch_size / 1000, color="#8b949e", linewidth=0.8, linestyle=":")
    losses.set(yscale="log", xlabel="thousand sequences", ylabel="nats per bit, in training")
    bits.plot(list(wrong), list(wrong.values()), "o-", color="#0072b2")
    bits.axvline(20, color="#8b949e", linewidth=0.8, linestyle=":")
    bits.set(xlabel="vectors to copy (trained on 1 to 20)", ylabel="wrong bits per sequence", ylim=(0, None))
    for axes in (losses, bits):
        plots.decorate(axes)
    return figure


def draw_memory(model: NTMModel) -> Figure:
    """Draw what goes in and comes out, and where the heads are, for one sequence of length 20."""
    batch = examples(20, 1)
    with torch.no_grad():
        said = model(batch.inputs)[0].sigmoid()
    said[:22] = 0  # nothing is asked for before
    trace = model.trace(batch.inputs)
    panels = {
        "inputs": batch.inputs[0],
        "outputs": said,
        "write weights": trace.write[0, :, 0, :],
        "read weights": trace.read[0, :, 0, :],
    }
    rows = rows_used(trace.write[0, :, 0], trace.read[0, :, 0])
    figure = Figure(figsize=(8, 6), layout="constrained")
    for axes, (name, shown) in zip(figure.subplots(2, 2, sharex=True).flat, panels.items(), strict=True):
        heads = name.endswith("weights")
        image = shown[:, rows] if heads else shown
        axes.imshow(image.T.numpy(), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=1)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_ylabel("row of the memory" if heads else "bit", fontsize=8)
        if heads:
            axes.set_xlabel("step", fontsize=8)
            axes.set_yticks(range(0, len(rows), 5), [str(row) for row in rows[::5]])
    return figure


def rows_used(*weights: torch.Tensor) -> list[int]:
    """List the rows that heads visit, from the first to the last, round the circle from its largest gap."""
    used = torch.stack([w.amax(0) for w in weights]).amax(0) > 0.1
    n = len(used)
    free = [next((k for k in range(n) if used[(i + k) % n]), n) for i in range(n)]
    start = (max(range(n), key=free.__getitem__) + max(free)) % n
    ordered = [(start + k) % n for k in range(n)]
    last = max((k for k, row in enumerate(ordered) if used[row]), default=n - 1)
    return ordered[: last + 1]


if __name__ == "__main__":
    main()

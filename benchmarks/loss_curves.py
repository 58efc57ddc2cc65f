"""Print and plot the validation losses of training runs at each step, side by side.

    unrolled train data.name=text data.order=drawn train.eval_every=340 run_dir=runs/bf16
    unrolled train data.name=text data.order=drawn train.eval_every=340 train.bf16=false run_dir=runs/fp32
    python benchmarks/loss_curves.py runs/bf16 runs/fp32 --out loss_curves.png

The table has the steps that all runs have. The plot is written to the file given by --out.
"""

import argparse
from pathlib import Path

from matplotlib import pyplot

from unrolled.bench.report import table
from unrolled.training import read_log

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("runs", type=Path, nargs="+")
parser.add_argument("--out", type=Path, default=Path("loss_curves.png"))
chosen = parser.parse_args()

losses = {
    str(run): {line["step"]: line["loss"] for line in read_log(run / "log.jsonl") if line["event"] == "eval"}
    for run in chosen.runs
}
figure, axes = pyplot.subplots(figsize=(5.6, 3.5), layout="constrained")
for name, found in losses.items():
    axes.plot(list(found), list(found.values()), marker="o", markersize=3, label=name)
axes.set(xlabel="steps", ylabel="validation loss, nats")
axes.grid(alpha=0.3)
axes.legend()
figure.savefig(chosen.out, dpi=120)
steps = sorted(set.intersection(*map(set, losses.values())))
print(table(["steps", *losses], [[f"{n:,}", *(f"{x[n]:.4f}" for x in losses.values())] for n in steps]))

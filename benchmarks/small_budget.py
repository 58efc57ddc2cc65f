"""Train every mechanism on the same small budget: gaps to fill if bidirectional, text to continue if causal.

    python benchmarks/small_budget.py                    # all of them, a few minutes each
    python benchmarks/small_budget.py linear performer   # some
    python benchmarks/small_budget.py --table            # tell what is there, train nothing

Results are kept in runs/small-budget, a folder for each mechanism and task, with table.md and table.png for
all. What is there already is not trained again, and an interrupted run goes on where it stopped. The budget
is far from enough to be good at either task: the figures compare mechanisms with each other, nothing else.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from unrolled import attention, data
from unrolled.cli._units import brief_time
from unrolled.cli.bench.report import table
from unrolled.contract import UnsupportedError
from unrolled.data import LabelledBatch
from unrolled.models import Decoder, DecoderConfig, Encoder, EncoderConfig, mask_tokens
from unrolled.training import TrainConfig, train

OUT = Path("runs/small-budget")
LENGTH = {"imdb": 1024, "shakespeare": 256}
SHAPE = {"d_model": 64, "n_layers": 2, "n_heads": 4}
BUDGET = TrainConfig(
    steps=300, batch_size=16, lr=3e-3, warmup_steps=30, eval_every=300, eval_batches=40, checkpoint_every=100
)
MASK = 256  # the id that stands for a gap


class Gaps:
    """IMDb reviews with 15% of their bytes to be restored (`mask_tokens`), drawn from the batch's number."""

    def __init__(self, reviews: Any) -> None:
        self.reviews = reviews

    def batch(self, split: str, *, step: int, batch_size: int, seed: int) -> LabelledBatch:
        """Return batch number `step`."""
        return self._gaps(self.reviews.batch(split, step=step, batch_size=batch_size, seed=seed), step)

    def eval_batches(self, batch_size: int) -> Iterator[LabelledBatch]:
        """Yield the reviews of the test part, always with the same gaps."""
        for number, batch in enumerate(self.reviews.eval_batches(batch_size)):
            yield self._gaps(batch, number)

    def _gaps(self, batch: LabelledBatch, number: int) -> LabelledBatch:
        generator = torch.Generator().manual_seed(number)
        inputs, targets = mask_tokens(batch.inputs, mask_id=MASK, vocab_size=MASK, generator=generator)
        return LabelledBatch(inputs, targets, batch.key_padding_mask)


def main() -> None:
    """Train what is missing, then tell all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mechanisms", nargs="*", help="all of them by default")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--data-dir", type=Path, help="where data files are kept")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for task in LENGTH if not chosen.table else ():
        options = {"length": LENGTH[task], "data_dir": chosen.data_dir}
        dataset: Any = data.load("text" if task == "shakespeare" else task, **options)
        for mechanism in chosen.mechanisms or attention.names():
            if not (OUT / mechanism / task / "result.json").exists():
                run(task, mechanism, dataset)
    tell()


def run(task: str, mechanism: str, dataset: Any) -> None:
    """Train one mechanism on one task, and keep what came of it."""
    folder = OUT / mechanism / task
    torch.manual_seed(0)
    shape: dict[str, Any] = SHAPE | {"attention": mechanism, "max_length": LENGTH[task]}
    try:
        if task == "imdb":
            model: Any = Encoder(EncoderConfig(MASK + 1, output="masked", **shape))
            dataset = Gaps(dataset)
        else:
            model = Decoder(DecoderConfig(dataset.vocab_size, **shape))
    except UnsupportedError as error:
        print(f"{task}: {error}")
        return
    print(f"{task}: {mechanism}", flush=True)
    outcome = train(model, dataset, BUDGET, folder)
    assert outcome.last_val is not None
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds_per_step": outcome.seconds / outcome.steps,
        "bits": outcome.last_val / math.log(2),
    }
    (folder / "result.json").write_text(json.dumps(result))


def tell() -> None:
    """Print and keep the table and the plot."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for mechanism in attention.names():
        files = {task: OUT / mechanism / task / "result.json" for task in LENGTH}
        found[mechanism] = {
            task: json.loads(file.read_text()) for task, file in files.items() if file.exists()
        }
    lines = [
        [mechanism, *(cell for task in LENGTH for cell in cells(results.get(task)))]
        for mechanism, results in found.items()
    ]
    header = ["parameters", "bits", "a step"]
    text = table(["contender", *(f"{task}: {name}" for task in LENGTH for name in header)], lines)
    print(text)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "table.md").write_text(text + "\n")
    draw(found).savefig(OUT / "table.png", dpi=150)


def cells(result: dict[str, float] | None) -> list[str]:
    """Tell one result; nothing where the mechanism cannot do the task."""
    if result is None:
        return ["-"] * 3
    return [f"{result['parameters']:,}", f"{result['bits']:.3f}", brief_time(result["seconds_per_step"])]


def draw(found: dict[str, dict[str, dict[str, float]]]) -> Figure:
    """Draw the bits of every mechanism in each task, the best on top."""
    figure = Figure(figsize=(9, 1.2 + 0.24 * len(found)), layout="constrained")
    titles = {"imdb": "IMDb: bits per missing byte", "shakespeare": "Shakespeare: bits per character"}
    for place, (task, title) in enumerate(titles.items()):
        bits = {name: results[task]["bits"] for name, results in found.items() if task in results}
        order = sorted(bits, key=bits.__getitem__, reverse=True)
        axes = figure.add_subplot(1, 2, place + 1)
        axes.plot([bits[name] for name in order], order, "o", color="#0072b2")
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(color="#d8dee4", linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()

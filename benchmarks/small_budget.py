"""Train every mechanism on the same small budget: reviews to judge and, where causal, text to continue.

    python benchmarks/small_budget.py                    # all of them, about two and a half minutes each
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
from unrolled.cli.bench.report import table
from unrolled.contract import UnsupportedError
from unrolled.models import Decoder, DecoderConfig, Encoder, EncoderConfig
from unrolled.training import TrainConfig, train

OUT = Path("runs/small-budget")
TASKS = ("imdb", "shakespeare")
LENGTH = {"imdb": 1024, "shakespeare": 256}
SHAPE: dict[str, dict[str, Any]] = {
    "imdb": {"vocab_size": 256, "n_classes": 2, "d_model": 64, "n_layers": 2, "n_heads": 4},
    "shakespeare": {"d_model": 128, "n_layers": 2, "n_heads": 4},
}
BUDGET: dict[str, dict[str, Any]] = {
    "imdb": {
        "steps": 400,
        "batch_size": 16,
        "lr": 2e-3,
        "warmup_steps": 40,
        "eval_every": 400,
        "eval_batches": 1,
    },
    "shakespeare": {"steps": 400, "batch_size": 16, "lr": 2e-3, "warmup_steps": 40, "eval_every": 400},
}
JUDGED = 2000  # reviews of the test part


def main() -> None:
    """Train what is missing, then tell all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mechanisms", nargs="*", help="all of them by default")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--data-dir", type=Path, help="where data files are kept")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for task in TASKS if not chosen.table else ():
        options = {"path": "tiny-shakespeare"} if task == "shakespeare" else {}
        name = "text" if task == "shakespeare" else task
        dataset: Any = data.load(name, length=LENGTH[task], data_dir=chosen.data_dir, **options)
        for mechanism in chosen.mechanisms or attention.names():
            if not (OUT / mechanism / task / "result.json").exists():
                run(task, mechanism, dataset)
    tell()


def run(task: str, mechanism: str, dataset: Any) -> None:
    """Train one mechanism on one task, and keep what came of it."""
    folder = OUT / mechanism / task
    torch.manual_seed(0)
    try:
        shape = SHAPE[task] | {"attention": mechanism, "max_length": LENGTH[task]}
        if task == "imdb":
            model: Any = Encoder(EncoderConfig(**shape))
        else:
            model = Decoder(DecoderConfig(dataset.vocab_size, **shape))
    except UnsupportedError as error:
        print(f"{task}: {error}")
        return
    print(f"{task}: {mechanism}", flush=True)
    outcome = train(model, dataset, TrainConfig(**BUDGET[task]), folder)
    assert outcome.last_val is not None
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds_per_step": outcome.seconds / outcome.steps,
        "loss": outcome.last_val,
        "accuracy": accuracy(model, dataset) if task == "imdb" else None,
    }
    (folder / "result.json").write_text(json.dumps(result))


@torch.inference_mode()
def accuracy(model: Encoder, dataset: Any) -> float:
    """Return the part of the first reviews of the test part that the model judges rightly."""
    right = judged = 0
    for batch in dataset.eval_batches(50):
        logits = model(batch.inputs, key_padding_mask=batch.key_padding_mask)
        right += int((logits.argmax(-1) == batch.targets).sum())
        judged += len(batch.targets)
        if judged >= JUDGED:
            break
    return right / judged


def results() -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Yield each mechanism with its results by task."""
    for mechanism in attention.names():
        files = {task: OUT / mechanism / task / "result.json" for task in TASKS}
        found = {task: json.loads(file.read_text()) for task, file in files.items() if file.exists()}
        if found:
            yield mechanism, found


def tell() -> None:
    """Print and keep the table and the plot."""
    lines, points = [], {}
    for mechanism, found in results():
        imdb, text = found.get("imdb"), found.get("shakespeare")
        bits = None if text is None else text["loss"] / math.log(2)
        lines.append(
            [
                mechanism,
                "-" if imdb is None else f"{imdb['accuracy']:.1%}",
                "-" if imdb is None else f"{imdb['seconds_per_step']:.2f} s",
                "-" if bits is None else f"{bits:.2f}",
                "-" if text is None else f"{text['seconds_per_step']:.2f} s",
            ]
        )
        points[mechanism] = (None if imdb is None else 100 * imdb["accuracy"], bits)
    header = ["contender", "IMDb, right", "a step", "Shakespeare, bits per character", "a step"]
    text = table(header, lines)
    print(text)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "table.md").write_text(text + "\n")
    draw(points).savefig(OUT / "table.png", dpi=150)


def draw(points: dict[str, tuple[float | None, float | None]]) -> Figure:
    """Draw both results of every mechanism, the best on top."""
    figure = Figure(figsize=(9, 1.2 + 0.24 * len(points)), layout="constrained")
    titles = ("IMDb: reviews judged rightly, %", "Shakespeare: bits per character")
    for column, title in enumerate(titles):
        found = {name: both[column] for name, both in points.items() if both[column] is not None}
        order = sorted(found, key=lambda name: found[name], reverse=column == 1)
        axes = figure.add_subplot(1, 2, column + 1)
        axes.plot([found[name] for name in order], order, "o", color="#0072b2")
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(color="#d8dee4", linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()

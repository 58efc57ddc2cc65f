"""Train every mechanism on the same small budget: reviews to judge if bidirectional, text to write if causal.

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
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from unrolled import attention, data
from unrolled.bench import plots
from unrolled.bench.report import table
from unrolled.bench.units import brief_time
from unrolled.contract import UnsupportedError
from unrolled.models import Decoder, DecoderConfig, Encoder, EncoderConfig
from unrolled.training import TrainConfig, train

OUT = Path("runs/small-budget")
TASKS: dict[str, dict[str, Any]] = {
    "imdb": {"length": 1024, "d_model": 32, "n_layers": 1, "n_heads": 4, "norm": "post", "positions": "none"},
    "shakespeare": {"length": 64, "d_model": 64, "n_layers": 2, "n_heads": 4},
}
BUDGET = {
    "imdb": TrainConfig(steps=250, batch_size=32, lr=3e-3, warmup_steps=25, eval_every=250, eval_batches=1),
    "shakespeare": TrainConfig(steps=800, batch_size=12, lr=3e-3, warmup_steps=80, eval_every=800),
}
OPTIONS = {"aft": {"position_bias": "local"}}  # its default is quadratic in the length
JUDGED = 2000  # reviews of the test part


def main() -> None:
    """Train what is missing, then tell all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mechanisms", nargs="*", help="all of them by default")
    parser.add_argument("--task", choices=TASKS, action="append", help="both by default")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--data-dir", type=Path, help="where data files are kept")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for task in (chosen.task or TASKS) if not chosen.table else ():
        settings = TASKS[task]
        options = {"length": settings["length"], "data_dir": chosen.data_dir}
        dataset: Any = data.load("text" if task == "shakespeare" else task, **options)
        for mechanism in chosen.mechanisms or attention.names():
            if not (OUT / mechanism / task / "result.json").exists():
                run(task, mechanism, dataset)
    tell()


def run(task: str, mechanism: str, dataset: Any) -> None:
    """Train one mechanism on one task, and keep what came of it."""
    folder = OUT / mechanism / task
    torch.manual_seed(0)
    settings = dict(TASKS[task])
    options = {name: given for name, given in OPTIONS.items() if name == mechanism}
    attend = {"attention": mechanism, "attention_options": options, "max_length": settings.pop("length")}
    shape: dict[str, Any] = attend | settings
    try:
        if task == "imdb":
            model: Any = Encoder(EncoderConfig(dataset.vocab_size, n_classes=dataset.n_classes, **shape))
        else:
            model = Decoder(DecoderConfig(dataset.vocab_size, **shape))
    except UnsupportedError as error:
        print(f"{task}: {error}")
        return
    print(f"{task}: {mechanism}", flush=True)
    outcome = train(model, dataset, BUDGET[task], folder, progress=sys.stdout.isatty())
    assert outcome.last_val is not None
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds_per_step": outcome.seconds / outcome.steps,
        "score": right(model, dataset) if task == "imdb" else outcome.last_val / math.log(2),
    }
    (folder / "result.json").write_text(json.dumps(result))


@torch.inference_mode()
def right(model: Encoder, dataset: Any) -> float:
    """Return the accuracy on `JUDGED` reviews, the same ones for all models."""
    batches = islice(dataset.eval_batches(50), JUDGED // 50)
    judged = [
        model(batch.inputs, key_padding_mask=batch.key_padding_mask).argmax(-1) == batch.targets
        for batch in batches
    ]
    return float(torch.cat(judged).float().mean())


def tell() -> None:
    """Print and keep the table and the plot."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for mechanism in attention.names():
        files = {task: OUT / mechanism / task / "result.json" for task in TASKS}
        found[mechanism] = {
            task: json.loads(file.read_text()) for task, file in files.items() if file.exists()
        }
    lines = [
        [mechanism, *cells(results.get("imdb"), "{:.1%}"), *cells(results.get("shakespeare"), "{:.2f}")]
        for mechanism, results in found.items()
    ]
    header = ["contender"]
    for task, score in {"IMDb": "accuracy", "Shakespeare": "bits per character"}.items():
        header += [f"{task}: {score}", "parameters", "a step"]
    text = table(header, lines)
    print(text)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "table.md").write_text(text + "\n")
    draw(found).savefig(OUT / "table.png", dpi=150)


def cells(result: dict[str, float] | None, score: str) -> list[str]:
    """Tell one result; nothing where the mechanism cannot do the task."""
    if result is None:
        return ["-"] * 3
    told = score.format(result["score"]), f"{result['parameters']:,}", brief_time(result["seconds_per_step"])
    return list(told)


def draw(found: dict[str, dict[str, dict[str, float]]]) -> Figure:
    """Draw the scores of every mechanism in each task, the best on top."""
    figure = Figure(figsize=(9, 1.2 + 0.24 * len(found)), layout="constrained")
    titles = {"imdb": "IMDb: accuracy", "shakespeare": "Shakespeare: bits per character"}
    for place, (task, title) in enumerate(titles.items()):
        scores = {name: results[task]["score"] for name, results in found.items() if task in results}
        order = sorted(scores, key=scores.__getitem__, reverse=task == "shakespeare")
        axes = figure.add_subplot(1, 2, place + 1)
        axes.plot([scores[name] for name in order], order, "o", color="#0072b2")
        plots.decorate(axes, title)
    return figure


if __name__ == "__main__":
    main()

"""Train an end-to-end memory network on each bAbI task, 10,000 questions each, and print the errors by task.

    python benchmarks/babi.py                # all tasks whose files are there, one to six minutes each
    python benchmarks/babi.py 1 16           # some
    python benchmarks/babi.py --table        # tell what is there, train nothing

Results are kept in runs/babi: TASK.json with the figures of a task, and the folder TASK with its model, which
`unrolled attend runs/babi/TASK` draws; table.md tells all. What is there already is not trained again; of a
task that was interrupted, finished restarts are kept.

The paper's recipe is 100 epochs of SGD and the best of 10 restarts on the training loss. This one is Adam
with a cosine, and the best of a few restarts on the validation part; the test files are read once, after the
choice. The rest is the same: 3 hops, adjacent tying, position and temporal encoding, random empty memories,
linear start.
"""

import argparse
import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from unrolled.bench.report import table
from unrolled.bench.units import duration
from unrolled.cli import run_config
from unrolled.data import Batch
from unrolled.data.babi import BabiDataset
from unrolled.models.memory_network import MemN2N, MemN2NConfig

OUT = Path("runs/babi")
NAMES = (
    "one supporting fact", "two supporting facts", "three supporting facts", "two-argument relations",
    "three-argument relations", "yes or no", "counting", "lists and sets", "simple negation",
    "indefinite knowledge", "basic coreference", "conjunction", "compound coreference", "reasoning on time",
    "basic deduction", "basic induction", "positions", "sizes", "path finding", "motivations",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How a task is trained.

    Attributes:
        epochs: passes over the training questions.
        linear: of these, the first ones without softmax.
        batch_size: questions per step.
        lr: of Adam; a cosine takes it to 0, from anew where the softmax comes in.
        clip: largest norm of the gradient.
        restarts: at most.
        enough: no further restart below this validation error.
        model: fields of the model's config.
    """

    epochs: int = 36
    linear: int = 16
    batch_size: int = 64
    lr: float = 5e-3
    clip: float = 40.0
    restarts: int = 3
    enough: float = 0.01
    model: dict[str, Any] = field(default_factory=lambda: {"d_model": 100})


def main() -> None:
    """Train what is missing, then tell all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", type=int, help="all whose files are there by default")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--data-dir", type=Path, help="where data files are kept")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    for name in ("epochs", "linear", "restarts", "batch_size"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Recipe, name))
    parser.add_argument("--lr", type=float, default=Recipe.lr)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("epochs", "restarts", "batch_size"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(chosen, name)}, but must be at least 1")
    recipe = Recipe(chosen.epochs, chosen.linear, chosen.batch_size, chosen.lr, restarts=chosen.restarts)
    if not chosen.table:
        try:
            tasks = BabiDataset(chosen.tasks or "all", data_dir=chosen.data_dir).tasks
        except ValueError as wrong:
            parser.error(str(wrong))
        for task in tasks:
            if not (chosen.out / f"{task}.json").exists():
                run(int(task), recipe, chosen.out, chosen.data_dir)
    tell(chosen.out)


def run(task: int, recipe: Recipe, out: Path, data_dir: Path | None) -> None:
    """Train one task, restart by restart, and keep the best model and its figures."""
    folder = out / str(task)
    settings = {"data": {"name": "babi", "tasks": [task], "data_dir": data_dir and str(data_dir)}}
    settings |= {"model": recipe.model, "run_dir": str(folder)}
    resolved = run_config.resolve(settings)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / run_config.FILE_NAME).write_text(yaml.safe_dump(settings))  # from which pictures find the data
    dataset: Any = resolved.dataset
    partial = out / f"{task}.partial.json"
    tried: list[dict[str, float]] = json.loads(partial.read_text()) if partial.exists() else []
    while len(tried) < recipe.restarts and all(x["val_error"] > recipe.enough for x in tried):
        began = time.perf_counter()
        model, loss = restart(dataset, resolved.model, recipe, seed=len(tried))
        wrong = error(model, dataset.eval_batches(500))
        if all(wrong < x["val_error"] for x in tried):
            model.save(folder)
        tried.append({"train_loss": loss, "val_error": wrong, "seconds": time.perf_counter() - began})
        partial.write_text(json.dumps(tried))
        print(f"task {task}: {tried[-1]}", flush=True)
    result = {
        "task": task,
        "test_error": error(MemN2N.load(folder), dataset.test_batches(500)),
        "val_error": min(x["val_error"] for x in tried),
        "restarts": tried,
        "seconds": sum(x["seconds"] for x in tried),
        "recipe": asdict(recipe),
    }
    (out / f"{task}.json").write_text(json.dumps(result, indent=1))
    partial.unlink()
    print(f"task {task}: {result['test_error']:.1%} of the test questions wrong", flush=True)


def restart(dataset: Any, config: MemN2NConfig, recipe: Recipe, seed: int) -> tuple[MemN2N, float]:
    """Train once from new weights; return the model and the mean training loss of its last epoch."""
    torch.manual_seed(seed)
    model = MemN2N(config).train()
    steps = math.ceil(dataset.epoch_size("train") / recipe.batch_size)
    phases = [(True, recipe.linear), (False, recipe.epochs - recipe.linear)]
    done = 0
    for linear, epochs in phases:
        model.linear = linear
        optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, epochs * steps))
        total = 0.0
        for step in range(epochs * steps):
            batch = dataset.batch("train", step=done, batch_size=recipe.batch_size, seed=seed)
            optimizer.zero_grad()
            loss = model.loss(batch.inputs, batch.targets, key_padding_mask=batch.key_padding_mask)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            schedule.step()
            total = loss.item() + (total if step % steps else 0.0)
            done += 1
    return model.eval(), total / steps


@torch.inference_mode()
def error(model: MemN2N, batches: Iterable[Batch]) -> float:
    """Return the part of the questions that the model answers wrongly."""
    model.eval()
    wrong = [
        model(batch.inputs, key_padding_mask=batch.key_padding_mask).argmax(-1) != batch.targets
        for batch in batches
    ]
    return float(torch.cat(wrong).float().mean())


def tell(out: Path) -> None:
    """Print and keep the table."""
    found = [json.loads(file.read_text()) for file in out.glob("*.json") if file.stem.isdigit()]
    found.sort(key=lambda result: result["task"])
    lines = [
        [
            f"{x['task']} {NAMES[x['task'] - 1]}",
            f"{x['test_error']:.1%}",
            f"{x['val_error']:.1%}",
            str(len(x["restarts"])),
            duration(x["seconds"]),
        ]
        for x in found
    ]
    if found:
        mean = sum(x["test_error"] for x in found) / len(found)
        lines.append(
            [f"mean of {len(found)}", f"{mean:.1%}", "", "", duration(sum(x["seconds"] for x in found))]
        )
    text = table(["task", "test error", "validation error", "restarts", "training"], lines)
    print(text)
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(text + "\n")


if __name__ == "__main__":
    main()

"""Train recurrent cells whose states hold the same number of numbers, with ever fewer recurrent parameters.

    python benchmarks/recurrent_cells.py                    # all of them, about 25 minutes of one core
    python benchmarks/recurrent_cells.py lstm kronecker     # some
    python benchmarks/recurrent_cells.py --table            # tell what is there, train nothing

Each is the one layer of a language model, on characters of Shakespeare and on the copy task. Results are kept
in runs/recurrent-cells, a folder for each contender and task, with table.md and table.png for all. What is
there already is not trained again, and an interrupted run goes on where it stopped.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from unrolled import data, recurrent
from unrolled.bench import plots
from unrolled.bench.report import table
from unrolled.bench.units import brief_time
from unrolled.models import RecurrentLM, RecurrentLMConfig
from unrolled.ops.state import leaves
from unrolled.training import TrainConfig, train

OUT = Path("runs/recurrent-cells")
STATE = 240  # numbers; the tape of lstmn grows by more than that with every token
CONTENDERS: dict[str, dict[str, Any]] = {
    "rnn": {"cell": "rnn", "hidden_size": STATE},
    "gru": {"cell": "gru", "hidden_size": STATE},
    "lstm": {"cell": "lstm", "hidden_size": STATE // 2},
    "low_rank_lstm-16": {"cell": "low_rank_lstm", "hidden_size": STATE // 2, "cell_options": {"rank": 16}},
    "low_rank_lstm-4": {"cell": "low_rank_lstm", "hidden_size": STATE // 2, "cell_options": {"rank": 4}},
    "kronecker": {"cell": "kronecker", "hidden_size": STATE},
    "kronecker_lstm": {"cell": "kronecker_lstm", "hidden_size": STATE // 2},
    "linear_attention": {"cell": "linear_attention", "d_model": 48, "cell_options": {"n_heads": 12}},
    "lstmn": {"cell": "lstmn", "hidden_size": STATE // 2},
}
RECURRENT = ("recurrent", "factors", "key_proj", "attended_proj", "score")  # what multiplies the state
TASKS: dict[str, dict[str, Any]] = {"text": {"length": 64}, "copy": {"length": 32}}
REPEATS = 20  # timings of a step
TITLES = {"text": "Shakespeare: bits per character", "copy": "Copy: nats per symbol"}
BUDGET = {
    "text": TrainConfig(steps=2400, batch_size=16, lr=3e-3, warmup_steps=100, eval_every=2400),
    "copy": TrainConfig(steps=3000, batch_size=32, lr=3e-3, warmup_steps=100, eval_every=3000),
}


def main() -> None:
    """Train what is missing, then tell all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contenders", nargs="*", metavar="contender", help="all of them by default")
    parser.add_argument("--task", choices=TASKS, action="append", help="both by default")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--steps", type=int, help="another budget, for a trial")
    parser.add_argument("--data-dir", type=Path, help="where data files are kept")
    chosen = parser.parse_args()
    if unknown := set(chosen.contenders) - set(CONTENDERS):
        parser.error(f"no such contender: {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}")
    torch.set_num_threads(1)
    for task in (chosen.task or TASKS) if not chosen.table else ():
        where = {"data_dir": chosen.data_dir} if task == "text" else {}
        dataset: Any = data.load(task, **TASKS[task], **where)
        for name in chosen.contenders or available():
            if not (OUT / name / task / "result.json").exists():
                run(task, name, dataset, chosen.steps)
    tell()


def available() -> list[str]:
    """List the contenders whose cell is there."""
    return [name for name, model in CONTENDERS.items() if model["cell"] in recurrent.names()]


def run(task: str, name: str, dataset: Any, steps: int | None) -> None:
    """Train one contender on one task, and keep what came of it."""
    folder, budget = OUT / name / task, BUDGET[task]
    if steps is not None:
        budget = TrainConfig(**vars(budget) | {"steps": steps, "warmup_steps": 0, "eval_every": steps})
    torch.manual_seed(0)
    model = RecurrentLM(RecurrentLMConfig(dataset.vocab_size, **{"d_model": 64} | CONTENDERS[name]))
    print(f"{task}: {name}", flush=True)
    outcome = train(model, dataset, budget, folder, progress=sys.stdout.isatty())
    assert outcome.last_val is not None
    recurrent_weights = [w for key, w in model.layers.named_parameters() if key.split(".")[1] in RECURRENT]
    result = {
        "state": sum(x.numel() for x in leaves(model.init_state(1)).values()),
        "recurrent": sum(w.numel() for w in recurrent_weights),
        "parameters": sum(w.numel() for w in model.parameters()),
        "seconds_per_step": seconds_per_step(model, budget.batch_size, TASKS[task]["length"]),
        "score": outcome.last_val / (math.log(2) if task == "text" else 1),
    }
    (folder / "result.json").write_text(json.dumps(result))


def seconds_per_step(model: RecurrentLM, batch_size: int, length: int) -> float:
    """Processor time of a loss and its gradient, which does not depend on what else the machine does."""
    tokens = torch.randint(model.config.vocab_size, (batch_size, length + 1))
    seconds = []
    for _ in range(REPEATS):
        began = time.process_time()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def tell() -> None:
    """Print and keep the table and the plot."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in available():
        files = {task: OUT / name / task / "result.json" for task in TASKS}
        results = {task: json.loads(file.read_text()) for task, file in files.items() if file.exists()}
        if results:
            found[name] = results
    header = ["contender", "numbers in the state", "recurrent parameters", "all parameters"]
    lines = []
    for name, results in found.items():
        first = next(iter(results.values()))
        size = "grows" if CONTENDERS[name]["cell"] == "lstmn" else f"{first['state']:,}"
        line = [name, size, f"{first['recurrent']:,}", f"{first['parameters']:,}"]
        for task in TASKS:
            result = results.get(task)
            told = (
                (f"{result['score']:.3f}", brief_time(result["seconds_per_step"])) if result else ("-", "-")
            )
            line += told
        lines.append(line)
    for task in TASKS:
        header += [TITLES[task], "a step"]
    text = table(header, lines)
    print(text)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "table.md").write_text(text + "\n")
    draw(found).savefig(OUT / "table.png", dpi=150)


def draw(found: dict[str, dict[str, dict[str, Any]]]) -> Figure:
    """Draw the scores over the recurrent parameters, one picture for each task."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    for place, (task, title) in enumerate(TITLES.items()):
        axes = figure.add_subplot(1, 2, place + 1)
        for name, results in found.items():
            if task not in results:
                continue
            point = results[task]["recurrent"], results[task]["score"]
            axes.plot(*point, "o", color="#0072b2")
            axes.annotate(name, point, xytext=(4, 4), textcoords="offset points", fontsize=8)
        axes.set_xscale("symlog", linthresh=10)  # linear_attention has none
        axes.set_xlim(-2, 1e6)
        axes.set_xlabel("parameters that multiply the state")
        plots.decorate(axes, title)
    return figure


if __name__ == "__main__":
    main()

"""Train small language models that differ in how they mix tokens, and compare them with softmax attention.

    python benchmarks/text_contenders.py                             # tiny-shakespeare, 1,200 steps: 2 hours
    python benchmarks/text_contenders.py --only linear softmax       # some
    python benchmarks/text_contenders.py --text warpeace.txt.gz --minutes 20
    python benchmarks/text_contenders.py --table                     # tell what is there, train nothing

Every contender is trained by `unrolled train` with one thread, and judged by `unrolled evaluate` on the whole
validation split, in windows of the trained length and of 1,024 characters. With `--minutes` each has the same
CPU time instead of the same steps: first it makes the steps of the other table, which tell what a step costs.
Results are kept in runs/text-contenders. What is there already is not trained again, and an interrupted run
goes on where it stopped.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from unrolled.bench.report import table

OUT = Path("runs/text-contenders")
STEPS = 1200
LENGTHS = (256, 1024)
BASE = [
    "model.recipe=classic",
    "data.length=256",
    "model.d_model=128",
    "train.batch_size=8",
    "train.bf16=true",
    "train.lr=3e-3",
    "train.threads=1",
]
BLOCKS = [*BASE, "model.n_layers=4", "model.n_heads=4"]


def blocks(attention: str, positions: str, options: str = "") -> list[str]:
    """Return the settings of a decoder with these mechanisms, `options` being those of the first."""
    first = attention.split(",")[0].strip("[")
    return [
        *BLOCKS,
        f"model.attention={attention}",
        f"model.positions={positions}",
        f"model.attention_options={{{first}: {{{options}}}}}",
    ]


CONTENDERS = {
    "linear": blocks("linear", "rotary"),
    "linear + convolution": blocks("linear", "none", "conv: 4"),
    "linear + convolution, windows of 32": [
        *blocks("[linear, window, linear, window]", "rotary", "conv: 4, rotary: false"),
        "model.attention_options.window.window=32",
    ],
    "gated linear": blocks("gated_linear", "none"),
    "gated delta rule + convolution": blocks("delta_net", "none", "conv: 4, gated: true"),
    "softmax": blocks("softmax", "rotary"),
    "softmax + convolution": blocks("softmax", "rotary", "conv: 4"),
    "LSTM": [
        *BASE,
        "model.name=recurrent_lm",
        "model.cell=lstm",
        "model.n_layers=2",
        "model.hidden_size=256",
    ],
}
CONTENDERS |= {
    f"{name}, Muon": [*CONTENDERS[name], "train.optimizer=muon"]
    for name in ("gated delta rule + convolution", "softmax + convolution")
}


def main() -> None:
    """Train what is missing, seed by seed, then tell all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--seeds", type=int, default=3, help="train with the seeds 0 to this, without it")
    parser.add_argument("--text", default="tiny-shakespeare", help="its name or file")
    parser.add_argument("--minutes", type=float, help="CPU minutes of training, instead of steps")
    parser.add_argument("--table", action="store_true", help="train nothing")
    chosen = parser.parse_args()
    budget = f"{chosen.minutes:g}-minutes" if chosen.minutes else f"{STEPS}-steps"
    folder = OUT / Path(chosen.text).name.partition(".")[0]
    for seed in range(0 if chosen.table else chosen.seeds):
        for name in chosen.only:
            run = folder / f"{STEPS}-steps" / name / str(seed)
            result = trained(name, seed, chosen.text, STEPS, run)
            if chosen.minutes:
                steps = round(STEPS * chosen.minutes * 60 / result["seconds"])
                trained(name, seed, chosen.text, steps, folder / budget / name / str(seed))
    tell(folder / budget)


def trained(name: str, seed: int, text: str, steps: int, folder: Path) -> dict[str, float]:
    """Return the figures of a run: its losses and the CPU seconds of its training."""
    kept = folder.with_suffix(".json")
    result: dict[str, float] = json.loads(kept.read_text()) if kept.exists() else {"seconds": 0.0}
    if result.get("steps") == steps:
        return result
    print(f"{folder}: {steps:,} steps", flush=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    budget = [f"train.steps={steps}", f"train.eval_every={steps}", f"train.seed={seed}"]
    before = cpu_seconds()
    try:
        unrolled(
            "train", "data.name=text", f"data.path={text}", f"run_dir={folder}", *CONTENDERS[name], *budget
        )
    finally:  # also of a run that will be resumed
        result["seconds"] += cpu_seconds() - before
        kept.write_text(json.dumps(result))
    for length in LENGTHS:
        out = folder / f"at-{length}.json"
        unrolled("evaluate", str(folder), "--length", str(length), "--out", str(out), "--force")
        result[str(length)] = json.loads(out.read_text())["loss"]
    kept.write_text(json.dumps({**result, "steps": steps}))
    return {**result, "steps": steps}


def unrolled(*arguments: str) -> None:
    """Run the command of this environment, with its report on stderr."""
    subprocess.run(
        [str(Path(sys.executable).with_name("unrolled")), *arguments], stdout=sys.stderr, check=True
    )


def cpu_seconds() -> float:
    """Return the CPU time of all commands that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def tell(folder: Path) -> None:
    """Print and keep the table: means over the seeds, and standard errors."""
    lines = []
    for name in CONTENDERS:
        found = [json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}/*.json"))]
        if done := [result for result in found if "steps" in result]:
            columns = [[result[str(length)] for result in done] for length in LENGTHS]
            seconds = statistics.mean(result["seconds"] for result in done)
            steps = statistics.mean(result["steps"] for result in done)
            losses = [mean_and_error(column) for column in columns]
            lines.append([name, str(len(done)), f"{steps:,.0f}", f"{seconds:,.0f}", *losses])
    header = ["contender", "seeds", "steps", "CPU seconds", *(f"nats at {length:,}" for length in LENGTHS)]
    text = table(header, lines)
    print(text)
    (folder / "table.md").write_text(text + "\n")


def mean_and_error(values: list[float]) -> str:
    """Write a mean and its standard error."""
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"


if __name__ == "__main__":
    main()

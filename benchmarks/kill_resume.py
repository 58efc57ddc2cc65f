"""Kill a training run with SIGKILL ten times at random moments, resume it each time, and compare the weights.

    python benchmarks/kill_resume.py [--kills 10] [--steps 400]

Trains a model of the digits twice through the command line, with dropout: once without interruption, and once
with the kills. Exits with 1 unless the final weights, the best weights and the logged losses of both runs
agree bit for bit.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

SETTINGS = [
    "data.name=digits",
    "model.d_model=64",
    "model.n_layers=2",
    "model.dropout=0.1",
    "train.threads=1",
]
SETTINGS += ["train.eval_every=100", "train.checkpoint_every=20", "train.batch_size=8"]


def start(run_dir: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start or resume a run in a process of its own."""
    command = [sys.executable, "-c", "from unrolled.cli import main; main()", "train", *SETTINGS]
    command += [f"train.steps={steps}", f"run_dir={run_dir}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def last_step(run_dir: Path) -> int:
    """Return the step of the last complete line of the log."""
    log = run_dir / "log.jsonl"
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def losses(run_dir: Path) -> list[tuple[str, int, float]]:
    """Return every loss in the log, without the fields that depend on the clock."""
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    return [(x["event"], x["step"], x["loss"]) for x in lines if "loss" in x]


def main() -> int:
    """Train both runs, print what happened, and return 0 if they agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        alone, killed = Path(folder, "alone"), Path(folder, "killed")
        began = time.perf_counter()
        start(alone, arguments.steps).wait()
        seconds = time.perf_counter() - began
        print(f"left alone: {arguments.steps} steps in {seconds:.0f} s")
        for kill in range(arguments.kills):
            process = start(killed, arguments.steps)
            target = (kill + rng.random()) * arguments.steps / arguments.kills
            while process.poll() is None and last_step(killed) < target:
                time.sleep(0.02)
            time.sleep(rng.random() * 0.05)
            process.kill()
            process.wait()
            print(f"kill {kill + 1}: after step {last_step(killed)}")
        start(killed, arguments.steps).wait()
        same = losses(alone) == losses(killed)
        for file in ("last.safetensors", "model.safetensors"):
            one, two = load_file(alone / file), load_file(killed / file)
            equal = one.keys() == two.keys() and all(one[x].equal(two[x]) for x in one)
            print(f"{file}: {len(one)} tensors, {'bit-identical' if equal else 'DIFFERENT'}")
            same &= equal
        print("equal bit for bit" if same else "DIFFERENT")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

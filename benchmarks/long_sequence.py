"""Train on War and Peace as one sequence, and print peak memory and tokens per second for each length.

    python benchmarks/long_sequence.py warpeace_input.txt.gz                      # 4 minutes
    python benchmarks/long_sequence.py warpeace_input.txt.gz --lengths 3200000    # half an hour
    python benchmarks/long_sequence.py warpeace_input.txt.gz --bf16 --segment 2048

For each length, a process with one thread makes one update of a decoder of 8 layers of width 256 with AdamW.
The gradient is that of the mean loss over the whole sequence, and is computed in segments. A short update
before it is not timed. For comparison, the first line of the table is ordinary training on windows of 4,096
tokens.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import time

import torch

from unrolled import data
from unrolled.bench.report import table
from unrolled.contract import Batch
from unrolled.models import Decoder, DecoderConfig
from unrolled.training import TrainConfig
from unrolled.training.gradients import add_gradient
from unrolled.training.memory import keep_freed_memory, process_bytes

WINDOW = 4_096
WINDOWS = 8


def main() -> None:
    """Measure each length in its own process, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", help="a file")
    parser.add_argument("--lengths", type=int, nargs="+", default=[65_536, 262_144])
    parser.add_argument("--segment", type=int, default=4_096)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure is not None:
        print(json.dumps(measured(chosen)))
        return
    rows, base = [], None
    for length in [0, *chosen.lengths]:
        command = [sys.executable, *sys.argv, "--measure", str(length)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
        if result.returncode:
            sys.exit(result.returncode)
        found = json.loads(result.stdout.splitlines()[-1])
        base = base or found["speed"]
        name = f"{found['tokens']:,}" if length else f"windows of {WINDOW:,}"
        speed = f"{found['speed']:,.0f}"
        rows.append([name, f"{found['peak'] / 1e6:,.0f}", speed, f"{found['speed'] / base:.2f}"])
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(["tokens of the sequence", "peak MB", "tokens/s", "relative"], rows))


def measured(chosen: argparse.Namespace) -> dict[str, float]:
    """Make one update on a sequence of `chosen.measure` tokens, or updates on windows if this number is 0."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    keep_freed_memory()
    length, updates = chosen.measure or WINDOW, 1 if chosen.measure else WINDOWS
    opened = gzip.open if chosen.text.endswith(".gz") else open
    with opened(chosen.text, "rt", encoding="utf-8-sig") as file:
        content = file.read()
    vocabulary = data.load("text", path=chosen.text)
    ids = vocabulary.encode(content[: updates * length + 1])
    if len(ids) <= updates * length:
        sys.exit(f"{chosen.text} has {len(ids):,} tokens, but must have more than {updates * length:,}")
    config = TrainConfig(segment=chosen.segment if chosen.measure else None, bf16=chosen.bf16)
    model = Decoder(
        DecoderConfig(vocabulary.vocab_size, d_model=256, n_layers=8, n_heads=8, positions="rotary")
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def update(start: int, end: int) -> float:
        batch = Batch(ids[None, start:end], ids[None, start + 1 : end + 1])
        optimizer.zero_grad()
        loss, _ = add_gradient(model, batch, 1.0, config, torch.device("cpu"))
        optimizer.step()
        return loss

    update(0, min(length, 2 * WINDOW))
    began = time.perf_counter()
    for start in range(0, updates * length, length):
        loss = update(start, start + length)
    seconds = time.perf_counter() - began
    tokens = updates * length
    print(f"loss {loss:.3f} after {seconds:.0f} s", file=sys.stderr)
    return {"tokens": tokens, "speed": tokens / seconds, "peak": process_bytes("VmHWM") or 0}


if __name__ == "__main__":
    main()

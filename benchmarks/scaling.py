"""How training and generation grow with the length: time and peak memory, linear beside softmax.

    python benchmarks/scaling.py [--lengths 1024 4096 16384] [--json scaling.json]

Each training figure comes from a process of its own (forward and backward of one sequence through a decoder),
whose peak memory the operating system reports, less that of the same process with a sequence of 64 tokens.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch

from unrolled.models import Decoder, DecoderConfig

SHAPE = {"d_model": 256, "n_layers": 4, "n_heads": 8, "positions": "none"}


def train_once(attention: str, length: int) -> dict[str, float]:
    """Forward and backward of one sequence: seconds (best of three) and the process's peak MiB."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Decoder(DecoderConfig(vocab_size=256, attention=attention, **SHAPE))
    tokens = torch.randint(256, (1, length + 1))
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        model.zero_grad()
        seconds.append(time.perf_counter() - began)
    return {"seconds": min(seconds), "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def train_in_process(attention: str, length: int) -> dict[str, float]:
    """Run `train_once` in a fresh process."""
    command = [sys.executable, __file__, "--once", attention, str(length)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def main() -> None:
    """Print the table, and write it as JSON on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16_384])
    parser.add_argument("--json")
    parser.add_argument("--once", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(train_once(arguments.once[0], int(arguments.once[1]))))
        return
    rows = []
    print(f"training one sequence, {SHAPE}, torch {torch.__version__}, 1 thread")
    print("attention   tokens  seconds  us/token  MiB over base  KiB/token")
    for attention in ("linear", "softmax"):
        base = train_in_process(attention, 64)["peak_mib"]
        for length in arguments.lengths:
            found = train_in_process(attention, length)
            mib, seconds = found["peak_mib"] - base, found["seconds"]
            rows.append({"attention": attention, "tokens": length, "seconds": seconds, "mib": mib})
            print(
                f"{attention:<10} {length:>7} {seconds:>8.2f} {seconds / length * 1e6:>9.0f} "
                f"{mib:>14.0f} {mib * 1024 / length:>10.1f}"
            )
    if arguments.json:
        with open(arguments.json, "w") as file:  # noqa: PTH123
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()

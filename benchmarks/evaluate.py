"""Loss of a run's best weights over its whole validation split, in nats per token and bits per token.

python benchmarks/evaluate.py runs/mnist-linear
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

from unrolled.cli import run_config
from unrolled.models import Decoder
from unrolled.training import evaluate

for folder in map(Path, sys.argv[1:]):
    run = run_config.resolve(run_config.read(folder / run_config.FILE_NAME, []))
    nats = evaluate(Decoder.load(folder), run.dataset, replace(run.train, eval_batches=None))
    print(f"{folder}: {nats:.4f} nats, {nats / math.log(2):.4f} bits per token")

"""Runs `unrolled train` on two processes under the agent of torchrun, which forks them instead.

    python -m training.elastic FOLDER RESTARTS WORDS...

A process that is started again takes a moment instead of the seconds in which Python imports torch. Each one writes its
id to FOLDER/RANK. The tests' folder must be on Python's path.
"""

import os
import sys
from pathlib import Path

from commands import run
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from training import many  # says what the process that is forked imports


def train(folder: str, *words: str) -> None:
    (Path(folder) / os.environ["RANK"]).write_text(str(os.getpid()))
    done = run("train", *words)
    assert done.exit_code == 0, done.output


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=int(sys.argv[2]),
        monitor_interval=0.1,
        start_method=many.context.get_start_method(),
    )
    elastic_launch(config, train)(sys.argv[1], *sys.argv[3:])

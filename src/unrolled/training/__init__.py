"""Training: one plain loop whose runs can be killed and resumed without a trace in the weights."""

from unrolled.training.checkpoint import read_metadata
from unrolled.training.config import TrainConfig
from unrolled.training.evaluation import evaluate
from unrolled.training.forecast import Forecast, dry_run
from unrolled.training.log import read_log
from unrolled.training.loop import TrainResult, train
from unrolled.training.memory import keep_freed_memory
from unrolled.training.positions import Score, evaluate_positions
from unrolled.training.processes import ElsewhereError

__all__ = [
    "ElsewhereError",
    "Forecast",
    "Score",
    "TrainConfig",
    "TrainResult",
    "dry_run",
    "evaluate",
    "evaluate_positions",
    "keep_freed_memory",
    "read_log",
    "read_metadata",
    "train",
]

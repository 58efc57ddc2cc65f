"""Which rows of a tokenised corpus are read does not depend on how many processes read them."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from corpora import story, write_corpus
from torch import Tensor

from unrolled import data
from unrolled.contract import IGNORED

from .many import results
from .standin import VOCAB, StandIn, run

STEPS = {"schedule": "constant", "eval_every": 100, "batch_size": 8}


class Recording(StandIn):
    """Keeps the rows that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.training:
            self.seen += inputs.tolist()
        return super().loss(inputs % VOCAB, torch.where(targets == IGNORED, targets, targets % VOCAB))


def read(rank: int, corpus: Path, run_dir: Path, steps: int, source: Path | None = None) -> list[list[int]]:
    if source is not None:
        if rank == 0:
            shutil.copytree(source, run_dir)
        dist.barrier()
    model = Recording()
    run(run_dir, model=model, data=data.load("tokens", path=corpus, length=24), steps=steps, **STEPS)
    return model.seen


@pytest.mark.scale
def test_two_processes_and_then_four_read_the_rows_of_one(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", [story(i, words=5 + i % 40) for i in range(300)])
    first = results(2, read, corpus, tmp_path / "two", 6)
    then = results(4, read, corpus, tmp_path / "four", 12, tmp_path / "two")
    expected = read(0, corpus, tmp_path / "one", 12)
    assert sorted(row for rank in (*first, *then) for row in rank) == sorted(expected)
    assert len({tuple(row) for row in expected}) > 90  # rows differ, so that others would be noticed

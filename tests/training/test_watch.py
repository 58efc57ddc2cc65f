"""What an update takes is that of the definitions: memory of activations, states of segments, bytes sent."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run

from unrolled import data
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.state import nbytes
from unrolled.training import TrainConfig, dry_run
from unrolled.training.watch import Taken

from .many import results

ROWS = 4


def decoder(dataset: Any, **options: Any) -> Decoder:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "n_layers": 3, "n_heads": 2, "positions": "rotary"} | options
    return Decoder(DecoderConfig(vocab_size=dataset.vocab_size, **sizes))


def taken(model: Decoder, dataset: Any, **options: Any) -> Taken:
    settings = {"batch_size": ROWS, "steps": 3, "eval_batches": 1, "threads": 1} | options
    found = dry_run(model, dataset, TrainConfig(**settings)).taken
    assert found is not None
    return found


def copies(length: int = 40) -> Any:
    return data.load("copy", length=length, val_size=8)


def test_activations_are_at_least_what_autograd_saves():
    dataset = copies()
    model, batch = decoder(dataset), dataset.batch("train", step=2, batch_size=ROWS, seed=0)
    own = {x.untyped_storage().data_ptr() for x in model.parameters()}
    saved = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        saved.update({storage.data_ptr(): storage.nbytes()} if storage.data_ptr() not in own else {})
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model.loss(batch.inputs, batch.targets)
    kept = sum(saved.values())
    found = taken(decoder(dataset), dataset).activation_bytes
    assert kept < found < 1.5 * kept
    del loss


def test_activations_grow_with_the_rows_and_shrink_where_they_are_recomputed():
    dataset = copies()
    four, eight = (taken(decoder(dataset), dataset, batch_size=n).activation_bytes for n in (4, 8))
    assert eight == pytest.approx(2 * four, rel=0.05)
    assert taken(decoder(dataset), dataset, gradient_checkpointing=True).activation_bytes < 0.8 * four


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_states_between_segments_are_one_less_than_segments(attention):
    dataset = copies()
    model, length = (
        decoder(dataset, attention=attention),
        dataset.batch("train", step=0, batch_size=1, seed=0),
    )
    segment = 7
    number, state = math.ceil(length.inputs.shape[1] / segment), model.init_state(ROWS)
    expected, rows = 0, length.inputs[:, :segment].expand(ROWS, -1)
    for _ in range(number - 1):
        expected += nbytes(state)
        state = model.prefill(rows, state)[1]
    assert taken(model, dataset, segment=segment).kept_bytes == expected


def sent(rank: int, options: dict[str, Any]) -> int:
    dataset = copies(8)
    return taken(decoder(dataset), dataset, **options).sent_bytes


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("shard", [1, 2])
def test_bytes_sent_are_those_of_the_formula(shard, accumulate):
    """Two processes send half of the weights for each gather or sum over them."""
    model = decoder(copies(8))

    def numbers(module: torch.nn.Module) -> int:  # FSDP2 fills up the rows to a multiple of the processes
        even = [len(x) + len(x) % 2 if shard == 2 else len(x) for x in module.parameters()]
        return sum(n * x[0].numel() for n, x in zip(even, module.parameters(), strict=True))

    blocks = numbers(model.stack.blocks)
    rest = numbers(model) - blocks
    micro_batches = accumulate // 2 or 1  # of each process
    if shard == 1:  # one sum of the gradients, as an all-reduce
        expected = 4 * (blocks + rest)
    else:  # blocks are gathered twice, the rest once; then gradients are reduced and scattered
        expected = micro_batches * 4 * (2 * blocks + rest + blocks + rest) // 2
    loss = 8  # an all-reduce of one number in fp64
    assert results(2, sent, {"shard": shard, "accumulate": accumulate}) == [expected + loss] * 2


def test_one_process_sends_nothing():
    assert sent(0, {}) == 0


def dry_run_of(rank: int, run_dir: Path) -> tuple[int, str]:
    settings = [
        "data.name=copy",
        "data.length=8",
        "model.d_model=16",
        "model.n_layers=1",
        "train.batch_size=4",
    ]
    done = run("train", "--dry-run", *settings, f"run_dir={run_dir}")
    return done.exit_code, done.stdout


def test_processes_forecast_together_and_the_first_prints(tmp_path):
    (code, printed), other = results(2, dry_run_of, tmp_path / "run")
    assert code == 0
    assert other == (0, "")
    assert re.search(r"processes +2; memory is that of the first, which sends [\d.]+ kB in a\s+step", printed)
    assert list(tmp_path.iterdir()) == []

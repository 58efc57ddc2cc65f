"""Processes that share each sequence train as one does, in fp64: losses, weights, checkpoints and errors."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from unrolled.contract import Batch
from unrolled.models import Decoder, DecoderConfig, RecurrentLM, RecurrentLMConfig
from unrolled.testing.sequence import Meeting
from unrolled.training import train
from unrolled.training.averaging import tensors_of
from unrolled.training.slices import slice_of
from unrolled.training.spread import whole

from .many import on, results
from .standin import config, losses

ROWS, LEVELS = 4, 11
STEPS = {"steps": 3, "log_every": 1, "eval_every": 2, "schedule": "constant", "batch_size": ROWS}
ROUNDING = 1e-9  # of AdamW, which divides a gradient of rounding errors by its own size
ALL = ["linear", "delta_net", "window", "softmax"]


@dataclass
class Rows:
    """Random ids, of which some targets are hidden; by choice padded, packed or read on."""

    length: int = 13
    padded: bool = False
    packed: bool = False
    reads_on: bool = False

    def batch(self, split: str, *, step: int, batch_size: int, seed: int) -> Batch:
        g = torch.Generator().manual_seed(step + 2)
        ids = torch.randint(LEVELS, (batch_size, self.length + 1), generator=g)
        hidden = torch.rand(batch_size, self.length, generator=g) < 0.3
        hidden[:2, self.length // 2 :] = True  # so that slices have no target
        batch = Batch(ids[:, :-1], ids[:, 1:].masked_fill(hidden, -100))
        if self.padded:
            lengths = torch.arange(1, batch_size + 1)[:, None] * self.length // batch_size
            padding = torch.arange(self.length) >= lengths
            batch = batch._replace(targets=batch.targets.masked_fill(padding, -100), key_padding_mask=padding)
        if self.packed:
            bounds = torch.arange(batch_size + 1, dtype=torch.int32) * self.length
            batch = batch._replace(cu_seqlens=bounds)
        if self.reads_on:
            batch = batch._replace(continues=torch.full((batch_size,), step % 4 > 0))
        return batch

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        for i in range(3):
            yield self.batch("val", step=-1 - i, batch_size=batch_size, seed=0)


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    options = {
        "attention": ALL,
        "attention_options": {"linear": {"conv": 4}, "window": {"window": 6}},
    } | options
    shape = {"d_model": 16, "n_layers": len(options["attention"]), "n_heads": 2}
    return Decoder(DecoderConfig(LEVELS, **{"positions": "rotary"} | shape | options)).double()


def trained(run_dir: Path, options: dict[str, Any]) -> dict[str, Any]:
    options = dict(options)
    data, attention = Rows(**options.pop("data", {})), options.pop("attention", ALL)
    model = decoder(attention=attention)
    train(model, data, config(**STEPS | options), run_dir, progress=False)
    return {name: whole(x.detach()).numpy() for name, x in tensors_of(model).items()}


CONSTANT = ["linear", "delta_net", "window"]
STREAM = {
    "carry_state": True,
    "data": {"length": 12, "reads_on": True},
    "attention": CONSTANT,
    "steps": 6,  # the rows begin anew in the fifth
}
SHARED = {
    "whole": {},
    "segments": {"segment": 4},
    "padded": {"segment": 6, "data": {"padded": True, "length": 11}},
    "recomputed": {"gradient_checkpointing": True, "accumulate": 3},
    "sharded": {"shard": 2, "segment": 4, "accumulate": 2, "ema": 0.9},
    "carried": STREAM | {"segment": 4},
}


def share(rank: int, folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: trained(folder / name, options) for name, options in cases.items()}


def as_one(folder: Path, name: str, options: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Compare with a run of one process that reads each sequence whole."""
    alone = {x: y for x, y in options.items() if x not in ("shard", "sequence", "segment")}
    expected = trained(folder / f"{name} alone", alone)
    mine, other = losses(folder / name), losses(folder / f"{name} alone")
    assert [x[:2] for x in mine] == [x[:2] for x in other]
    np.testing.assert_allclose([x[2] for x in mine], [x[2] for x in other], rtol=ROUNDING)
    for x in found:
        assert x[name].keys() == expected.keys()
        for key, right in expected.items():
            np.testing.assert_allclose(x[name][key], right, rtol=0, atol=ROUNDING, err_msg=key)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, results(2, share, folder, {name: {"sequence": 2} | x for name, x in SHARED.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_two_processes_that_share_sequences_are_one(name, on_two):
    folder, found = on_two
    as_one(folder, name, SHARED[name], found)


def resume(rank: int, folder: Path, two: Path) -> dict[str, Any]:
    cases = {
        "teams": {"sequence": 2, "segment": 4},
        "sharded teams": {"sequence": 2, "shard": 4, "accumulate": 3},
        "four": {"sequence": 4},
        "stream": STREAM | {"sequence": 2},
    }
    if rank == 0:
        shutil.copytree(two / "carried", folder / "resumed")
    dist.barrier()
    return share(rank, folder, cases | {"resumed": STREAM | {"sequence": 2, "steps": 10}})


@pytest.mark.scale
def test_two_teams_of_two_are_one_and_go_on_with_the_states_of_one_team(on_two, tmp_path):
    found = results(4, resume, tmp_path, on_two[0])
    for name, options in (
        ("teams", {}),
        ("sharded teams", {"accumulate": 3}),
        ("four", {}),
        ("stream", STREAM),
        ("resumed", STREAM | {"steps": 10}),
    ):
        as_one(tmp_path, name, options, found)


def refused(rank: int, folder: Path) -> list[str]:
    cases: list[tuple[dict[str, Any], dict[str, Any], Any]] = [
        ({"sequence": 3}, {}, None),
        ({"segment": 5}, {}, None),
        ({"carry_state": True}, {"reads_on": True}, decoder(attention=CONSTANT)),
        ({}, {"packed": True}, None),
        ({}, {}, decoder(attention=["aft"], attention_options={}, positions="none")),
        ({}, {}, RecurrentLM(RecurrentLMConfig(LEVELS, d_model=16, n_layers=1)).double()),
    ]
    said = []
    for options, data, model in cases:
        with pytest.raises((ValueError, RuntimeError)) as error:
            train(
                model or decoder(),
                Rows(**data),
                config(**STEPS | {"sequence": 2} | options),
                folder / "run",
                progress=False,
            )
        said.append(str(error.value))
    return said


def test_what_cannot_be_shared_is_said_by_one_process(tmp_path):
    first, second = on(2, refused, tmp_path)
    assert first == [
        "sequence is 3, but must divide the number of processes, which is 2",
        "segment is 5, but must be a multiple of sequence = 2",
        "with carry_state, the length of the rows must be a multiple of sequence = 2, but it is 13",
        "packed sequences cannot be shared by processes: use sequence=1",
        first[4],
        first[5],
    ]
    assert first[4].startswith("aft attention cannot read a sequence that processes share")
    assert first[5].startswith("a recurrent layer cannot read a sequence that processes share")
    assert second == [f"process 0 of the run failed: {x}" for x in first]
    assert not (tmp_path / "run").exists()


def test_one_process_has_nobody_to_share_with(tmp_path):
    with pytest.raises(
        ValueError, match="sequence is 2, but must divide the number of processes, which is 1"
    ):
        train(decoder(), Rows(), config(sequence=2), tmp_path / "run", progress=False)


@given(
    length=st.integers(1, 30),
    size=st.integers(1, 4),
    each=st.integers(1, 5),
    cut=st.booleans(),
    padded=st.booleans(),
)
def test_slices_are_equal_and_hold_every_token_once(length, size, each, cut, padded):
    ids = torch.arange(2 * length).view(2, length)
    batch = Batch(ids, ids + 100, key_padding_mask=ids % 5 == 0 if padded else None)
    meeting, segment = Meeting(size), each * size
    parts = [slice_of(batch, meeting.of(rank), segment if cut else None) for rank in range(size)]
    assert len({part.inputs.shape for part in parts}) == 1
    width = each if cut else parts[0].inputs.shape[1]
    for name in ("inputs", "targets", "key_padding_mask"):
        if getattr(batch, name) is None:
            assert all(getattr(part, name) is None for part in parts)
            continue
        columns = [getattr(part, name).split(width, dim=1) for part in parts]
        joined = torch.cat([x for segment in zip(*columns, strict=True) for x in segment], dim=1)
        assert torch.equal(joined[:, :length], getattr(batch, name))
        filling = {"inputs": 0, "targets": -100, "key_padding_mask": True}[name]
        assert joined.shape[1] - length < size
        assert (joined[:, length:] == filling).all()

"""States carried from batch to batch, alone and together with segments, on one process and on two."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unrolled.contract import Batch, UnsupportedError
from unrolled.models import Decoder, DecoderConfig
from unrolled.training import read_log, train
from unrolled.training.averaging import tensors_of
from unrolled.training.spread import whole

from .many import results
from .standin import config, losses, run, same, weights

LEVELS, LENGTH, EACH = 11, 9, 3
SETTINGS = {"carry_state": True, "log_every": 1, "schedule": "constant", "eval_every": 20}


class Stream:
    """Rows of which each reads on for three batches, row 1 from the second batch on only."""

    def __init__(self, stop: int | None = None) -> None:
        self.ids = torch.randint(LEVELS, (4, 100), generator=torch.Generator().manual_seed(0))
        self.stop = stop

    def batch(self, split: str, *, step: int, batch_size: int, seed: int) -> Batch:
        if step == self.stop:
            raise InterruptedError
        start = step % EACH * LENGTH
        window = self.ids[:batch_size, start : start + LENGTH + 1]
        continues = torch.full((batch_size,), step % EACH > 0)
        continues[1] &= step % EACH > 1
        return Batch(window[:, :-1], window[:, 1:], continues=continues)

    def eval_batches(self, batch_size: int):
        yield Batch(self.ids[:, :-1], self.ids[:, 1:])


def hybrid(**options: Any) -> Decoder:
    torch.manual_seed(0)
    options = {
        "attention": ["linear", "window"],
        "attention_options": {"linear": {"conv": 4, "rotary": False}, "window": {"window": 6}},
        "positions": "rotary",
    } | options
    return Decoder(DecoderConfig(LEVELS, d_model=16, n_layers=2, n_heads=2, **options)).double()


def logged(run_dir: Path) -> list[float]:
    return [x["loss"] for x in read_log(run_dir / "log.jsonl") if x["event"] == "train"]


@pytest.mark.parametrize("segment", [None, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_rows_that_read_on_have_the_loss_of_the_whole_sequence(tmp_path, segment, accumulate):
    model, data = hybrid(), Stream()
    still = {"lr": 1e-30, "steps": 4, "accumulate": accumulate, "segment": segment}
    train(model, data, config(**SETTINGS | still), tmp_path, progress=False)
    found = logged(tmp_path)

    def loss(step: int) -> float:
        """The mean loss of a batch, of which each row is read from where it began."""
        total, start = 0.0, step % EACH * LENGTH
        for row in range(4):
            first = LENGTH if row == 1 and start >= LENGTH else 0  # row 1 begins again in the second batch
            nll = torch.nn.functional.cross_entropy(
                model(data.ids[row : row + 1, first : start + LENGTH])[0, start - first :],
                data.ids[row, start + 1 : start + LENGTH + 1],
            )
            total += nll.item() / 4
        return total

    with torch.no_grad():
        expected = [sum(loss(n * accumulate + i) for i in range(accumulate)) / accumulate for n in range(4)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_no_gradient_crosses_from_batch_to_batch(tmp_path):
    model, other, data = hybrid(), hybrid(), Stream()
    settings = config(**SETTINGS | {"steps": 1, "accumulate": 2, "clip_norm": None, "warmup_steps": 0})
    train(model, data, settings, tmp_path, progress=False)
    state = other.init_state(4)
    for step in range(2):
        batch = data.batch("train", step=step, batch_size=4, seed=0)
        if step:
            state = type(state)(*(_fresh(x, y) for x, y in zip(state, other.init_state(4), strict=True)))
        loss, state = other.loss_from(batch.inputs, batch.targets, state)
        (loss / 2).backward()
    for x, y in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-15)


def _fresh(state: Any, empty: Any) -> Any:
    """Detach a state; row 1 begins anew."""
    if isinstance(state, torch.Tensor):
        cut = state.detach().clone()
        cut[1] = empty[1]
        return cut
    parts = [_fresh(x, y) for x, y in zip(state, empty, strict=True)]
    return state._make(parts) if hasattr(state, "_make") else tuple(parts)


def test_resume_is_bit_for_bit(tmp_path):
    run(tmp_path / "alone", model=hybrid(), data=Stream(), **SETTINGS)
    for stop in (2, 7):
        with pytest.raises(InterruptedError):
            run(tmp_path / "cut", model=hybrid(), data=Stream(stop), **SETTINGS)
    run(tmp_path / "cut", model=hybrid(), data=Stream(), **SETTINGS)
    assert any(name.startswith("carried.") for name in weights(tmp_path / "cut"))
    assert same(weights(tmp_path / "alone"), weights(tmp_path / "cut"))
    assert losses(tmp_path / "alone") == losses(tmp_path / "cut")


def several(rank: int, folder: Path, runs: dict[str, dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    found = []
    for name, options in runs.items():
        model = hybrid()
        train(model, Stream(), config(**SETTINGS | options), folder / name, progress=False)
        found.append({n: whole(x.detach()).numpy() for n, x in tensors_of(model).items()})
    return found


RUNS: dict[str, dict[str, Any]] = {
    "carried": {"segment": 4},
    "carried in micro-batches": {"accumulate": 2},
    "carried by shards": {"shard": 2, "segment": 4},
    "in segments": {"carry_state": False, "segment": 4},
    "in segments by shards": {"carry_state": False, "shard": 2, "segment": 4, "gradient_checkpointing": True},
}


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    for found in results(2, several, tmp_path / "two", RUNS):
        alone = several(0, tmp_path / "one", {n: {**x, "shard": 1} for n, x in RUNS.items()})
        for one, two in zip(alone, found, strict=True):
            assert one.keys() == two.keys()
            assert max(float(np.abs(one[n] - two[n]).max()) for n in one) < 1e-9
    # what two have carried, one goes on with
    for name, options in RUNS.items():
        more = config(**SETTINGS | options | {"shard": 1, "steps": 15})
        both = [hybrid(), hybrid()]
        for model, folder in zip(both, ("one", "two"), strict=True):
            train(model, Stream(), more, tmp_path / folder / name, progress=False)
        for x, y in zip(*(model.parameters() for model in both), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-9)


def test_what_cannot_be_carried_is_refused(tmp_path):
    class Drawn(Stream):
        def batch(self, split, *, step, batch_size, seed):
            return super().batch(split, step=step, batch_size=batch_size, seed=seed)._replace(continues=None)

    with pytest.raises(ValueError, match=r"rows of the data do not continue .* data.order=consecutive"):
        run(tmp_path / "a", model=hybrid(), data=Drawn(), **SETTINGS)
    with pytest.raises(UnsupportedError, match="state of this Decoder grows"):
        run(
            tmp_path / "b", model=hybrid(attention="softmax", attention_options={}), data=Stream(), **SETTINGS
        )
    with pytest.raises(UnsupportedError, match="this Decoder has 32 positions, which the text exceeds"):
        run(tmp_path / "c", model=hybrid(positions="learned", max_length=32), data=Stream(), **SETTINGS)
    cosformer = {"linear": {"feature_map": "cosformer", "feature_map_options": {"max_length": 31}}}
    with pytest.raises(UnsupportedError, match="this Decoder has 32 positions, which the text exceeds"):
        run(
            tmp_path / "d",
            model=hybrid(attention="linear", attention_options=cosformer),
            data=Stream(),
            **SETTINGS,
        )
    assert not list(tmp_path.iterdir())


def test_the_states_of_packed_documents_are_not_carried(tmp_path):
    class Packed(Stream):
        def batch(self, split, *, step, batch_size, seed):
            batch = super().batch(split, step=step, batch_size=batch_size, seed=seed)
            return batch._replace(cu_seqlens=torch.arange(batch_size + 1, dtype=torch.int32) * LENGTH)

    with pytest.raises(ValueError, match=r"data\.order=consecutive, without packed documents"):
        run(tmp_path / "a", model=hybrid(), data=Packed(), **SETTINGS)
    assert not list(tmp_path.iterdir())

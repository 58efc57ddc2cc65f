"""Random features and rotations are drawn anew on a schedule, the same ones in a run that was resumed."""

import pytest
import torch

from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.random_features import Projection

from .standin import VOCAB, StandIn, run, same, weights
from .test_resume import StopError, stops_at

OPTIONS = {
    "performer": {"n_features": 8},
    "rfa": {"n_features": 8},
    "reformer": {"n_rounds": 2, "chunk": 4, "n_buckets": 2},
}


def model():
    torch.manual_seed(0)
    sizes = {"d_model": 8, "n_layers": 3, "n_heads": 2}
    return Decoder(DecoderConfig(VOCAB, attention=list(OPTIONS), attention_options=OPTIONS, **sizes))


def rows(trained):
    return [m.weight for m in trained.modules() if isinstance(m, Projection)]


def test_rows_are_drawn_again_between_updates(tmp_path):
    trained, expected = model(), model()
    run(tmp_path, model=trained, steps=7, redraw_every=3)
    found = [m for m in trained.modules() if isinstance(m, Projection)]
    assert [int(m.redraws) for m in found] == [2, 2, 2]  # before the 4th and the 7th
    for projection in (m for m in expected.modules() if isinstance(m, Projection)):
        projection.redraw()
        projection.redraw()
    assert all(torch.equal(a, b) for a, b in zip(rows(trained), rows(expected), strict=True))
    kept = model()
    run(tmp_path / "kept", model=kept, steps=7)
    assert all(torch.equal(a, b) for a, b in zip(rows(kept), rows(model()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("cut", [4, 6, 7])
def test_such_a_run_resumes_bit_for_bit(tmp_path, cut):
    options = {"steps": 9, "redraw_every": 3, "checkpoint_every": 2}
    run(tmp_path / "alone", model=model(), **options)
    with pytest.raises(StopError):
        run(tmp_path / "cut", model=model(), data=stops_at(cut), **options)
    run(tmp_path / "cut", model=model(), **options)
    assert same(weights(tmp_path / "alone"), weights(tmp_path / "cut"))


def test_a_model_without_random_features_is_refused_before_it_trains(tmp_path):
    untouched = StandIn()
    with pytest.raises(ValueError, match="redraw_every is set, but the model has no random features"):
        run(tmp_path, model=untouched, redraw_every=100)
    before = zip(untouched.parameters(), StandIn().parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in before)
    assert not list(tmp_path.iterdir())  # an earlier run there would be whole, too

"""Evaluations of a trained model with other settings."""

import pytest
import torch

from unrolled.cli import run_config
from unrolled.cli._experiments import _refilled

DATA = {"name": "copy", "length": 16, "val_size": 4}


def run(folder, **options):
    model = {"d_model": 16, "n_layers": 1, "n_heads": 2, "recipe": "classic", **options}
    return run_config.resolve({"data": DATA, "model": model, "run_dir": str(folder)})


def reformer(rounds):
    options = {"n_rounds": rounds, "chunk": 4, "n_buckets": 4}
    return {"attention": "reformer", "attention_options": {"reformer": options}}


def test_the_weights_are_kept_and_only_what_is_drawn_for_another_size_is_not(tmp_path):
    model = run(tmp_path, **reformer(2)).new_model(torch.device("cpu")).eval()
    more = _refilled(run(tmp_path, **reformer(8)), model, "more")
    assert more.config.attention_options["reformer"]["n_rounds"] == 8
    for name, x in model.named_parameters():
        assert torch.equal(x, dict(more.named_parameters())[name]), name
    tokens = torch.randint(10, (2, 16))
    same = _refilled(run(tmp_path, **reformer(2)), model, "more")
    assert torch.equal(same(tokens), model(tokens))  # the rotations too
    assert not torch.equal(more(tokens), model(tokens))


@pytest.mark.parametrize("options", [{"d_model": 32}, {"n_layers": 2}, {"attention": "aft"}], ids=str)
def test_settings_that_need_other_weights_are_refused(tmp_path, options):
    model = run(tmp_path).new_model(torch.device("cpu"))
    with pytest.raises(ValueError, match="the trained weights do not fit the evaluation 'other': "):
        _refilled(run(tmp_path, **options), model, "other")

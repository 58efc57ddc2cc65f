"""Evaluations of a trained model with other settings."""

import pytest
import torch

from unrolled.bench.spectra import mean_mass
from unrolled.cli import run_config
from unrolled.cli._experiments import _evaluated, _refilled

DATA = {"name": "copy", "length": 16, "val_size": 4}


def settings(folder, seed=0, **options):
    model = {"d_model": 16, "n_layers": 1, "n_heads": 2, "recipe": "classic", **options}
    return {"data": DATA, "model": model, "train": {"seed": seed}, "run_dir": str(folder)}


def run(folder, seed=0, **options):
    return run_config.resolve(settings(folder, seed, **options))


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


def performer(n_features):
    return {"attention": "performer", "attention_options": {"performer": {"n_features": n_features}}}


def test_a_softmax_model_is_evaluated_with_random_features(tmp_path):
    model = run(tmp_path, attention="softmax").new_model(torch.device("cpu")).eval()
    model.stack.blocks[0].attention.qkv_proj.weight.data.mul_(10)  # so that the weights are not all alike
    tokens = torch.randint(10, (2, 16))

    def evaluated(n_features, seed=0):
        return _refilled(run(tmp_path, seed, **performer(n_features)), model, "features")

    with torch.no_grad():
        errors = [float((evaluated(n)(tokens) - model(tokens)).abs().mean()) for n in (4, 64, 16384)]
        assert errors[0] > errors[1] > 4 * errors[2] > 0
        assert torch.equal(evaluated(64)(tokens), evaluated(64)(tokens))
        assert not torch.equal(evaluated(64, seed=1)(tokens), evaluated(64)(tokens)), "other rows by the seed"


def test_the_spectrum_of_a_layer_is_measured_in_place_of_the_loss(tmp_path):
    values = settings(tmp_path, attention="softmax", n_layers=2)
    model = run_config.resolve(values).new_model(torch.device("cpu")).eval()
    found = _evaluated(model, values, "layer 2", {"spectrum": 2, "data.length": 12})
    shorter = run_config.resolve(values | {"data": DATA | {"length": 12}})
    assert found == {"spectral_mass": mean_mass(model, shorter.dataset, 2)}


@pytest.mark.parametrize("options", [{"d_model": 32}, {"n_layers": 2}, {"attention": "aft"}], ids=str)
def test_settings_that_need_other_weights_are_refused(tmp_path, options):
    model = run(tmp_path).new_model(torch.device("cpu"))
    with pytest.raises(ValueError, match="the trained weights do not fit the evaluation 'other': "):
        _refilled(run(tmp_path, **options), model, "other")


def test_a_spectrum_is_that_of_the_model_with_its_other_settings(tmp_path):
    values = settings(tmp_path, attention="softmax", positions="rotary")
    trained = run_config.resolve(values).new_model(torch.device("cpu")).eval()
    trained.stack.blocks[0].attention.qkv_proj.weight.data.mul_(10)
    found = _evaluated(trained, values, "apart", {"spectrum": 1, "model.positions": "none"})
    other = run(tmp_path, attention="softmax", positions="none")
    assert found == {"spectral_mass": mean_mass(_refilled(other, trained, "apart"), other.dataset, 1)}
    assert found != {"spectral_mass": mean_mass(trained, other.dataset, 1)}

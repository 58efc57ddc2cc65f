"""Folders of packed weights as models: the rounded weights, which are packed into the same bytes again."""

import shutil

import pytest
import torch
from planned import MODELS, decoder, tokens
from torch import nn

from unrolled.data import Vocabulary
from unrolled.decode import load, load_model, packed_form, plan
from unrolled.decode.packing import PACKINGS, TILE, rounded
from unrolled.folders import PLAN_FILE
from unrolled.models import Decoder
from unrolled.ops import native

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)


def folder_of(tmp_path, weights="int8", **options):
    model = decoder(**options)
    plan(model, weights).save(tmp_path / "plan")
    return model, tmp_path / "plan"


@pytest.mark.parametrize("weights", PACKINGS)
@pytest.mark.parametrize("name", ["hybrid", "delta rule, gated", "odd widths", "pixels", "post-norm, swiglu"])
def test_the_weights_are_the_rounded_ones(name, weights, tmp_path):
    model, folder = folder_of(tmp_path, weights, **MODELS[name])
    found = load_model(folder)
    assert (type(found), found.config) == (Decoder, model.config)
    for path, module in model.named_modules():
        matrix = f"{path}.weight"
        if isinstance(module, nn.Linear):
            fine = weights == "int4" and (path == "head.project" or len(module.weight) < TILE)
            expected = rounded(module.weight, "int8" if fine else weights)
        elif isinstance(module, nn.Embedding) and path == "embedding":
            expected = rounded(module.weight, "fp32" if weights == "fp32" else "bf16")
        else:
            continue
        assert torch.equal(found.get_parameter(matrix), expected), matrix
    others = {x for x, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    for path, x in model.state_dict().items():
        if path.endswith(".bias") or path.rpartition(".")[0] not in others:
            assert torch.equal(found.state_dict()[path], x), path
    assert all(x.dtype == torch.float32 and x.requires_grad for x in found.parameters())


@pytest.mark.parametrize(
    ("name", "weights"), [*((name, "int8") for name in MODELS), ("hybrid", "bf16"), ("hybrid", "fp32")]
)
def test_it_is_packed_into_the_same_bytes_again(name, weights, tmp_path):
    _, folder = folder_of(tmp_path, weights, **MODELS[name])
    plan(load_model(folder), weights).save(tmp_path / "again")
    assert (tmp_path / "again" / PLAN_FILE).read_bytes() == (folder / PLAN_FILE).read_bytes()


@pytest.mark.parametrize("name", ["hybrid", "tied embeddings"])
def test_it_computes_what_the_plan_does_but_for_the_rounding_of_inputs(name, tmp_path):
    _, folder = folder_of(tmp_path, **MODELS[name])
    ids, made = tokens(), load(folder)
    found = load_model(folder)(ids)
    assert (found - made.prefill(ids, made.init_state(3))[0]).abs().max() <= 0.02 * found.abs().max()


def test_it_needs_no_kernels_and_nothing_of_the_file(tmp_path, monkeypatch):
    model, folder = folder_of(tmp_path, "fp32", **MODELS["hybrid"])
    monkeypatch.setattr(native, "missing", lambda: "there is no compiler")
    found = load_model(folder)
    (folder / PLAN_FILE).write_bytes(b"")  # a mapped file would fail below
    with torch.no_grad():
        assert torch.equal(found.eval()(tokens()), model(tokens()))


def test_models_of_their_own_are_read_as_ever(tmp_path):
    model = Vocabulary("text", characters=[chr(i) for i in range(33, 104)]).attach(decoder())
    model.save(tmp_path / "own")
    assert packed_form(tmp_path / "own") is None
    assert torch.equal(load_model(tmp_path / "own").embedding.weight, model.embedding.weight)
    plan(model, "int4").save(tmp_path / "plan")
    assert packed_form(tmp_path / "plan") == "int4"
    assert load_model(tmp_path / "plan").documents == model.documents
    shutil.copy(
        tmp_path / "plan" / PLAN_FILE, tmp_path / "own"
    )  # the model's own weights are the better ones
    assert packed_form(tmp_path / "own") is None
    assert torch.equal(load_model(tmp_path / "own").embedding.weight, model.embedding.weight)
    with pytest.raises(ValueError, match="is not a model's folder"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match=r"unrolled\.decode\.load_model reads both"):
        Decoder.load(tmp_path / "plan")

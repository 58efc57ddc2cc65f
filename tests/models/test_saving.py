import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from unrolled import models
from unrolled.models import Decoder, DecoderConfig, Encoder, EncoderConfig, saving
from unrolled.ops.feature_maps import make_feature_map

SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 4, "max_length": 8}


def small_decoder(**fields) -> Decoder:
    return Decoder(DecoderConfig(7, **SMALL | fields))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "fields",
    [
        {"attention": ["linear", "softmax"], "attention_options": {"softmax": {"head_dim": 6}}},
        {"tie_embeddings": True, "start_token": True, "positions": "rotary"},
        {"inputs": "pixels", "head": "logistic_mixture", "norm": "post", "n_kv_heads": 1},
    ],
    ids=str,
)
def test_a_decoder_comes_back_bit_for_bit(fields, dtype, tmp_path):
    model = small_decoder(**fields).to(dtype)
    model.save(tmp_path / "deep" / "model")
    tokens = torch.randint(7, (2, 8))
    for loaded in (models.load(tmp_path / "deep" / "model"), Decoder.load(tmp_path / "deep" / "model")):
        assert isinstance(loaded, Decoder)
        assert loaded.config == model.config
        assert torch.equal(loaded(tokens), model(tokens))


def test_an_encoder_comes_back_bit_for_bit(tmp_path):
    model = Encoder(EncoderConfig(input_dim=3, n_classes=2, **SMALL))
    model.save(tmp_path)
    loaded, x = models.load(tmp_path), torch.randn(2, 8, 3)
    assert isinstance(loaded, Encoder)
    assert torch.equal(loaded(x), model(x))
    with pytest.raises(ValueError, match="kind 'encoder', wanted 'decoder'"):
        Decoder.load(tmp_path)


def test_a_folder_of_before_a_field_was_there_is_still_read(tmp_path):
    model = Encoder(EncoderConfig(7, n_classes=2, **SMALL))
    model.save(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for name in ("norm_eps", "n_segments", "embedding_norm", "head_hidden", "output_bias"):
        del config[name]
    file.write_text(json.dumps(config))
    tokens = torch.randint(7, (2, 8))
    assert torch.equal(Encoder.load(tmp_path)(tokens), model(tokens))


def test_the_folder_holds_a_readable_config_and_the_weights_only(tmp_path):
    small_decoder().save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model"] == "decoder"
    assert config["d_model"] == 16


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9999])
def test_a_truncated_file_is_refused(share, tmp_path):
    small_decoder().save(tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match=re.escape(f"{file} is not a readable safetensors file")):
        models.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c | {"d_modle": 3, "colour": 1}, "has the unknown keys ['colour', 'd_modle']"),
        (
            lambda c: c | {"model": "oracle"},
            "kind 'oracle', wanted one of ['decoder', 'encoder', ",
        ),
        (lambda c: {k: v for k, v in c.items() if k != "vocab_size"}, "lacks the keys ['vocab_size']"),
        (lambda c: {k: v for k, v in c.items() if k != "model"}, "does not say which kind of model"),
        (lambda c: c | {"norm": "middle"}, "norm is 'middle', wanted one of"),
        (lambda c: [c], "does not say which kind of model"),
        (lambda c: c | {"model": ["decoder"]}, "does not say which kind of model"),
        (lambda c: c | {"max_length": 9}, "positions.table.weight in"),
        (lambda c: c | {"max_length": 9}, "has the shape [8, 16], wanted [9, 16]"),
        (
            lambda c: c | {"positions": "none"},
            "holds 1 tensors unknown to this model, first 'positions.table.weight'",
        ),
        (lambda c: c | {"n_layers": 3}, "tensors of this model, the first is 'stack.blocks.2."),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(change, message, tmp_path):
    small_decoder().save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(ValueError, match=re.escape(message)):
        models.load(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is not a model's folder: config\.json: No such file"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model": ')
    with pytest.raises(ValueError, match="is not valid JSON"):
        models.load(tmp_path)
    small_decoder().save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="is not a readable safetensors file: No such file"):
        models.load(tmp_path)


def test_a_failed_save_leaves_the_old_model_and_nothing_half_written(tmp_path, monkeypatch):
    model = small_decoder()
    model.save(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def disk_full(tensors, file):
        file.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(saving, "save_file", disk_full)
    with pytest.raises(OSError, match="no space left"):
        model.save(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    with pytest.raises(
        OSError, match="no space left"
    ):  # another model: its weights must not meet the old config
        small_decoder(n_heads=2).save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"model.safetensors"}


def test_weights_are_plain_safetensors(tmp_path):
    model = small_decoder()
    model.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    save_file({name: torch.zeros_like(x) for name, x in weights.items()}, tmp_path / "model.safetensors")
    assert (models.load(tmp_path)(torch.zeros(1, 2, dtype=torch.long)) == 0).all()


def test_a_config_that_json_cannot_say_is_refused_before_anything_is_written(tmp_path):
    model = small_decoder(attention_options={"linear": {"feature_map": make_feature_map("relu", 4)}})
    with pytest.raises(ValueError, match=r"the config holds a .*, wanted what JSON can say"):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()

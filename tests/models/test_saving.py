import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import small_model

from unrolled import files, models
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.feature_maps import make_feature_map

CHANGED = "model.safetensors or config.json was changed after it was saved"
SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 4, "max_length": 8}


def small_decoder(**fields) -> Decoder:
    return Decoder(DecoderConfig(7, **SMALL | fields))


BUCKETS = {"reformer": {"chunk": 4, "n_buckets": 4}}
REFORMER = {"attention": "reformer", "attention_options": BUCKETS, "reversible": True}
GRID = {"vocab_size": None, "input_dim": 3, "grid": [4, 4], "n_bands": 2, "positions": "none"}
GATED = {
    "softmax": {"qk_norm": "all", "output_gate": True, "rotary": True, "rotary_dim": 2, "rotary_base": 5e5}
}
SAVED = [
    ("decoder", {"attention": ["linear", "softmax"], "attention_options": {"softmax": {"head_dim": 6}}}),
    (
        "decoder",
        {"norm": ["res_post", "pre"], "bias": False, "attention": "softmax", "attention_options": GATED},
    ),
    ("decoder", {"tie_embeddings": True, "start_token": True, "positions": "rotary"}),
    ("decoder", {"inputs": "pixels", "head": "logistic_mixture", "norm": "post", "n_kv_heads": 1}),
    ("decoder", {"positions": "axial", "axial_shape": [4, 6], "ff_chunk": 5, **REFORMER}),
    ("encoder", {"vocab_size": None, "input_dim": 3}),
    ("encoder_decoder", {"norm": "pre", "positions": "rotary", "cross_attention": "linear"}),
    ("encoder_decoder", {"decoder_attention": "gated_linear", "cross_attention": "rfa"}),
    ("encoder_decoder", {"norm": ["res_post"], "bias": False}),
    ("encoder_decoder", {"positions": "learned", "tie_embeddings": False, "source_vocab_size": 13}),
    ("luong_seq2seq", {"attention": "luong.LocalPredictiveAttention", "attention_options": {"window": 2}}),
    ("luong_seq2seq", {"attention": "hard", "n_layers": 3}),
    ("lstmn_seq2seq", {"attention": "fixed", "source_vocab_size": 9}),
    ("deep_lstmn_seq2seq", {"source_vocab_size": 9}),
    ("rnn_seq2seq", {"readout_state": "current", "attention": "cosine", "readout_size": 3}),
    ("memnn", {"n_hops": 3, "margin": 0.5}),
    ("memory_network", {"tying": "layer_wise"}),
    ("ntm", {"cell": "lstmn", "n_layers": 2}),
    ("ntm_numbers", {"cell_options": {"memory_size": 5, "memory_width": 4}}),
    ("perceiver", GRID),
    ("perceiver", {"share_weights": False, "input_width": 6}),
    ("perceiver_io", {"output": "masked", "n_classes": None, "tie_embeddings": True}),
    ("perceiver_ar", {"attention": ["softmax", "linear"], "positions": "rotary", "inputs": "pixels"}),
    ("recurrent_lm", {"cell": "low_rank_lstm", "cell_options": {"rank": 3}, "hidden_size": 6, "n_layers": 2}),
    ("vit", {"pooling": "mean", "max_length": 4}),
]


def without(*keys):
    return lambda found: {key: x for key, x in found.items() if key not in keys}


def inputs_of(kind, fields, dtype):
    """Arguments of `forward`."""
    if kind in ("memnn", "memory_network"):
        return (torch.randint(7, (2, 4, 3)),)
    if kind.startswith("ntm") or kind == "vit" or fields.get("input_dim"):
        sizes = {"vit": (3, 8, 8), "perceiver": (4, 4, 3), "encoder": (8, 3)}.get(kind, (8, 4))
        return (torch.randn(2, *sizes, dtype=dtype),)
    tokens = torch.randint(7, (2, 8))
    return (tokens, tokens) if kind.endswith(("seq2seq", "encoder_decoder")) else (tokens,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("kind", "fields"), SAVED, ids=str)
def test_a_model_comes_back_bit_for_bit(kind, fields, dtype, tmp_path):
    model = small_model(kind, **fields).to(dtype).eval()
    model.save(tmp_path / "deep" / "model")
    inputs = inputs_of(kind, fields, dtype)
    for load in (models.load, type(model).load):
        loaded = load(tmp_path / "deep" / "model")
        assert type(loaded) is type(model)
        assert loaded.config == model.config
        assert torch.equal(loaded.eval()(*inputs), model(*inputs))


def test_a_module_that_blocks_share_is_saved(tmp_path):
    model, tokens = small_model("decoder", n_layers=2).eval(), torch.randint(7, (2, 8))
    model.stack.blocks[1].ff = model.stack.blocks[0].ff
    model.save(tmp_path)
    assert torch.equal(models.load(tmp_path).eval()(tokens), model(tokens))


def test_each_weight_keeps_its_own_type(tmp_path):
    model = small_model("decoder").bfloat16()
    model.stack.blocks[0].ff.float()
    model.save(tmp_path)
    loaded = models.load(tmp_path).state_dict()
    assert {name: x.dtype for name, x in loaded.items()} == {
        name: x.dtype for name, x in model.state_dict().items()
    }


def test_a_model_of_another_kind_is_refused(tmp_path):
    small_model("encoder").save(tmp_path)
    with pytest.raises(ValueError, match="kind 'encoder', but must hold one of kind 'decoder'"):
        Decoder.load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *(("decoder", {"attention": name}) for name in ("linear", "softmax", ["linear", "softmax"])),
        *((kind, {}) for kind in ("encoder", "encoder_decoder", "perceiver", "perceiver_io", "vit")),
        ("perceiver_ar", {"prefix_dropout": 0.9, "n_latents": 4}),
    ],
    ids=str,
)
def test_recomputing_changes_no_gradient(kind, fields):
    inputs = inputs_of(kind, fields, torch.float64)
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = small_model(kind, dropout=0.3, **fields).double().train()
        model.gradient_checkpointing = recompute
        classes = kind in ("encoder", "perceiver", "perceiver_io", "vit")
        torch.manual_seed(5)
        model.loss(inputs[0], torch.tensor([0, 2]) if classes else inputs[-1]).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert any(x is not None and x.any() for x in gradients[0])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


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
            "kind 'oracle', but must hold one of bilstm_transcriber, decoder, ",
        ),
        (without("vocab_size"), "lacks the keys ['vocab_size']"),
        (
            without("attention", "n_heads"),
            "lacks the keys ['attention', 'n_heads']: it is not as it was saved",
        ),
        (without("model"), "does not name a kind of model"),
        (lambda c: c | {"norm": "middle"}, "norm is 'middle', but must be one of"),
        (lambda c: [c], "does not name a kind of model"),
        (lambda c: c | {"model": ["decoder"]}, "does not name a kind of model"),
        (lambda c: c | {"max_length": 9}, CHANGED),
        (lambda c: c | {"attention": "softmax"}, CHANGED),
        (lambda c: c | {"dropout": 0.5}, CHANGED),
        (lambda c: c | {"n_layers": 10**9}, "n_layers is 1000000000, but there are 29 tensors"),
        (lambda c: c | {"d_model": 10**9}, "describes a larger model than"),
        (lambda c: c | {"vocab_size": 10**30}, "is not valid JSON: the integer 1"),
        (lambda c: c | {"max_length": 10**9}, "describes a larger model than"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(change, message, tmp_path):
    small_decoder().save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(ValueError, match=re.escape(message)):
        models.load(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is not a model's folder: it has no config\.json"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model": ')
    with pytest.raises(ValueError, match="is not valid JSON"):
        models.load(tmp_path)
    small_decoder().save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor plan\.safetensors"):
        models.load(tmp_path)


def test_a_failed_save_leaves_the_old_model_and_nothing_half_written(tmp_path, monkeypatch):
    model = small_decoder()
    model.save(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def disk_full(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(files, "save_file", disk_full)
    with pytest.raises(OSError, match="no space left"):
        model.save(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    with pytest.raises(OSError, match="no space left"):
        small_decoder(n_heads=2).save(tmp_path)  # another model: its weights must not meet the old config
    assert {file.name for file in tmp_path.iterdir()} == {"model.safetensors"}


def test_a_config_as_written_by_another_tool_is_the_same_config(tmp_path):
    small_decoder().save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()), sort_keys=True, indent=None))
    models.load(tmp_path)


def test_weights_are_plain_safetensors(tmp_path):
    model = small_decoder()
    model.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    save_file({name: torch.zeros_like(x) for name, x in weights.items()}, tmp_path / "model.safetensors")
    assert (models.load(tmp_path)(torch.zeros(1, 2, dtype=torch.long)) == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x | {"stack.norm.weight": torch.ones(16).long()},
            "is torch.int64, but must be a floating",
        ),
        (lambda x: x | {"stack.norm.weight": torch.ones(3)}, "has shape [3], but must have [16]"),
        (lambda x: x | {"extra": torch.ones(3)}, "holds 1 tensors unknown to this model, first 'extra'"),
        (without("stack.norm.weight"), "lacks 1 tensors of this model"),
    ],
)
def test_weights_of_another_program_that_do_not_fit_are_refused_by_name(change, message, tmp_path):
    model = small_decoder()
    model.save(tmp_path)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    save_file(change(weights), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(message)):
        models.load(tmp_path)


def test_documents_are_saved_with_the_model_and_belong_to_it(tmp_path):
    model = small_decoder()
    model.documents["vocabulary.json"] = {"kind": "text", "characters": ["a", "é"]}
    model.save(tmp_path)
    assert models.load(tmp_path).documents == model.documents
    file = tmp_path / "vocabulary.json"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("a", "b", 1), encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json or vocabulary\.json was changed after it was saved"):
        models.load(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=re.escape(f"{file} cannot be read: No such file")):
        models.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "plan.safetensors", "a,b.json", "a/b.json", ""]
)
def test_a_document_cannot_take_the_place_of_the_model(name, tmp_path):
    model = small_decoder()
    model.documents[name] = 1
    with pytest.raises(ValueError, match=re.escape(f"documents has the name {name}")):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_config_that_json_cannot_say_is_refused_before_anything_is_written(tmp_path):
    model = small_decoder(attention_options={"linear": {"feature_map": make_feature_map("relu", 4)}})
    with pytest.raises(ValueError, match=r"the config holds a .*, which is not JSON-serialisable"):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()

"""The classes for transformers compute the same as our models, and survive saving and loading."""

import json
from functools import partial

import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from hf_models import SMALL, make, prompts
from safetensors.torch import load, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers import AutoModelForMaskedLM as AutoMaskedLM
from transformers import AutoModelForSequenceClassification as AutoClassifier

from unrolled.contract import UnsupportedError
from unrolled.interop import hf
from unrolled.interop.hf import digest
from unrolled.models import Decoder, DecoderConfig, Encoder

CLASSES = {
    hf.UnrolledForCausalLM: AutoModelForCausalLM,
    hf.UnrolledForMaskedLM: AutoMaskedLM,
    hf.UnrolledForSequenceClassification: AutoClassifier,
}
MASK = torch.tensor([[1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]])


@pytest.fixture
def ids():
    return prompts()


def same_weights(one, other):
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(
        x.dtype == theirs[name].dtype and torch.equal(x, theirs[name]) for name, x in mine.items()
    )


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("linear", {"tie_embeddings": True}),
        ("performer", {"positions": "axial", "axial_shape": [4, 4], "num_labels": 3}),
        ("softmax", {"attention": ["softmax", "linear"], "positions": "none", "reversible": True}),
    ],
)
def test_a_saved_model_is_loaded_unchanged(kind, name, fields, ids, tmp_path):
    model = make(name, kind, **fields)
    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    for loader in (kind, CLASSES[kind]):
        again = loader.from_pretrained(tmp_path)
        assert type(again) is kind
        assert same_weights(again, model)
        assert not again.training
        assert torch.equal(again(ids).logits, model(ids).logits)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is hf.UnrolledConfig
    assert same_weights(kind(config).double(), kind(config).double()) is False  # drawn, not read
    assert CLASSES[kind].from_config(config).state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("kind", [*CLASSES, hf.UnrolledModel], ids=lambda kind: kind.__name__)
def test_a_bare_model_loads_any_of_them_without_its_head(kind, ids, tmp_path):
    model = make("softmax", kind, head_hidden="gelu" if kind is hf.UnrolledForMaskedLM else None)
    model.save_pretrained(tmp_path)
    bare = AutoModel.from_pretrained(tmp_path)
    assert type(bare) is hf.UnrolledModel
    assert not [name for name in bare.state_dict() if ".head" in name]
    inside, padding = model.model, MASK == 0
    found = bare(ids, attention_mask=MASK).last_hidden_state
    if kind is hf.UnrolledForCausalLM:
        found = inside.head(found)
    read = inside if isinstance(inside, Decoder) else inside.encode
    assert torch.equal(found[~padding], read(ids, key_padding_mask=padding)[~padding])
    bare.save_pretrained(tmp_path / "bare")
    again = AutoModel.from_pretrained(tmp_path / "bare")
    assert same_weights(again, bare)
    assert type(again.model) is type(bare.model)


def test_a_bare_decoder_continues_a_cache_and_gets_a_new_head(ids, tmp_path):
    model = AutoModel.from_config(make().config).double().eval()
    whole = model(ids, attention_mask=MASK)
    assert whole.cache.get_seq_length() == ids.shape[1]
    cache = hf.StateCache()
    parts = [
        model(ids[:, a:b], attention_mask=MASK[:, :b], cache=cache, return_dict=False)[0]
        for a, b in ((0, 3), (3, 4), (4, 7))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1)[MASK == 1], whole.last_hidden_state[MASK == 1])
    assert model(ids, use_cache=False).cache is None
    model.save_pretrained(tmp_path)
    with_head = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(with_head.model.embedding.weight, model.model.embedding.weight)
    assert 0.005 < with_head.model.head.project.weight.std() < 0.05


def bare(**fields):
    return hf.UnrolledModel(hf.UnrolledConfig(**SMALL, **fields))


def test_a_bare_encoder_has_segments_and_no_cache(ids):
    encoder = bare(n_segments=2, is_decoder=False)
    assert encoder(ids, token_type_ids=torch.ones_like(ids)).cache is None


def test_models_of_one_config_do_not_change_each_other(ids, tmp_path):
    config = hf.UnrolledConfig(**SMALL)
    encoder = hf.UnrolledForMaskedLM(config)
    hf.UnrolledForCausalLM(config)
    encoder.save_pretrained(tmp_path)
    assert isinstance(AutoModel.from_pretrained(tmp_path).model, Encoder)
    decoder = hf.UnrolledModel(config)
    hf.UnrolledForMaskedLM(config)
    assert decoder(ids).cache is not None


def test_random_features_survive_saving(ids, tmp_path):
    model = make("rfa").float()
    model.save_pretrained(tmp_path)
    assert same_weights(hf.UnrolledForCausalLM.from_pretrained(tmp_path), model)
    half = hf.UnrolledForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half(ids).logits.dtype == torch.bfloat16


def test_shards_replace_the_file_of_an_earlier_save(tmp_path):
    for options in ({}, {"max_shard_size": "2KB"}, {}):
        model = make()
        for x in model.parameters():
            torch.nn.init.normal_(x)
        model.save_pretrained(tmp_path, **options)
        assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == bool(options)
        read = hf.load(tmp_path).state_dict()
        assert all(torch.equal(x, read[name]) for name, x in model.state_dict().items())


def test_the_digest_of_a_save_covers_only_the_files_it_wrote(tmp_path):
    model = make("linear").float()
    model.save_pretrained(tmp_path)
    for options in ({}, {"max_shard_size": "2KB"}):
        model.half().save_pretrained(tmp_path, variant="fp16", **options)
        read = partial(hf.UnrolledForCausalLM.from_pretrained, tmp_path)
        assert same_weights(read(variant="fp16"), model)
        assert same_weights(read(dtype=torch.float32), make("linear").float())
    make("softmax").save_pretrained(tmp_path, variant="other")
    assert read(variant="other").config.attention == "softmax"
    for variant in (None, "fp16"):
        with pytest.raises(ValueError, match=r"or config.json was changed after it was saved"):
            read(variant=variant)


def test_layers_that_share_weights_survive_saving(ids, tmp_path):
    options = {"linformer": {"max_length": 16, "rank": 4, "sharing": "layerwise"}}
    model = make("linformer", hf.UnrolledForMaskedLM, attention_options=options)
    model.save_pretrained(tmp_path)
    again = hf.UnrolledForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_logits_and_losses_are_those_of_the_model_inside(ids):
    labels = ids.masked_fill(ids == ids[0, 1], -100)
    decoder = make()
    out = decoder(ids, attention_mask=MASK, labels=labels)
    padding = MASK == 0
    assert out.cache is None
    inside = decoder.model(ids, key_padding_mask=padding)
    assert torch.equal(out.logits[~padding], inside[~padding])
    targets = labels.masked_fill(padding, -100)[:, 1:]
    # Nothing is predicted at padding.
    loss = decoder.model.loss(ids[:, :-1], targets, key_padding_mask=padding[:, :-1])
    torch.testing.assert_close(out.loss.double(), loss, rtol=1e-6, atol=0)
    for parts in (1, 4):  # as `Trainer` counts them
        n = parts * (labels[:, 1:] != -100).sum()
        part = decoder(ids, attention_mask=MASK, labels=labels, num_items_in_batch=n).loss
        torch.testing.assert_close(part * parts, out.loss, rtol=1e-6, atol=0)

    masked = make(kind=hf.UnrolledForMaskedLM)
    out = masked(ids, attention_mask=MASK, labels=labels)
    loss = masked.model.loss(ids, labels, key_padding_mask=padding)
    torch.testing.assert_close(out.loss.double(), loss, rtol=1e-6, atol=0)

    classifier = make(kind=hf.UnrolledForSequenceClassification, num_labels=3)
    classes = torch.tensor([2, 0])
    out = classifier(ids, attention_mask=MASK, labels=classes)
    loss = classifier.model.loss(ids, classes, key_padding_mask=padding)
    torch.testing.assert_close(out.loss, loss)
    assert classifier(ids, return_dict=False)[0].shape == (2, 3)


def test_padding_changes_nothing_whatever_its_id(ids):
    for kind in CLASSES:
        model = make("softmax", kind)
        out = model(ids, attention_mask=MASK).logits
        other = model(torch.where(MASK == 0, 1000, ids), attention_mask=MASK).logits
        assert torch.equal(out, other)


def test_a_new_head_starts_as_in_a_new_model(ids, tmp_path):
    masked = make(kind=hf.UnrolledForMaskedLM)
    masked.save_pretrained(tmp_path)
    model, info = AutoClassifier.from_pretrained(
        tmp_path, num_labels=3, ignore_mismatched_sizes=True, output_loading_info=True
    )
    head = model.model.head.project
    assert head.weight.shape == (3, 16)
    assert 0.005 < head.weight.std() < 0.05
    assert not head.bias.any()
    assert info["mismatched_keys"]
    assert torch.equal(model.model.embedding.weight, masked.model.embedding.weight)


def test_a_head_with_a_hidden_layer_may_be_missing(tmp_path):
    make(kind=hf.UnrolledForMaskedLM, head_hidden="gelu").save_pretrained(tmp_path)
    AutoModel.from_pretrained(tmp_path).save_pretrained(tmp_path / "bare")
    model = AutoClassifier.from_pretrained(tmp_path / "bare")
    assert 0.005 < model.model.head_hidden.dense.weight.std() < 0.05


def test_the_folder_may_be_named_by_keyword_and_hold_files_of_others(ids, tmp_path):
    adapter = tmp_path / "adapter_model.safetensors"
    save_file({"x": torch.zeros(2)}, adapter)
    before = adapter.read_bytes()
    model = make()
    model.save_pretrained(tmp_path)
    assert adapter.read_bytes() == before
    adapter.write_bytes(b"damaged")
    model.save_pretrained(tmp_path)
    again = hf.UnrolledForCausalLM.from_pretrained(pretrained_model_name_or_path=tmp_path)
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_weights_on_several_devices_are_refused_where_a_state_is_needed(ids, tmp_path):
    make(n_layers=4).save_pretrained(tmp_path)
    places = {"model.embedding": "cpu", "model.stack": "disk", "model.head": "cpu"}
    places |= {f"model.{name}": "cpu" for name, _ in make().model.named_children() if name not in ("stack",)}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "offload"
    )
    assert torch.isfinite(model(ids, use_cache=False).logits).all()
    for call in (model, partial(model.generate, max_new_tokens=2)):
        with pytest.raises(UnsupportedError, match="the weights are on several devices"):
            call(ids)


def test_gradient_checkpointing_changes_no_gradient(ids):
    model = make().train()
    model(ids, labels=ids).loss.backward()
    expected = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    model.activation_checkpointing_enable()
    assert model.model.gradient_checkpointing
    model(ids, labels=ids).loss.backward()
    for name, x in model.named_parameters():
        torch.testing.assert_close(x.grad, expected[name])


def test_names_of_both_libraries_set_the_same_field():
    theirs = {
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "max_position_embeddings": 33,
        "tie_word_embeddings": True,
    }
    config = hf.UnrolledConfig(vocab_size=9, n_classes=4, **theirs)
    ours = DecoderConfig(
        9, d_model=24, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=40, max_length=33, tie_embeddings=True
    )
    assert config.decoder_config() == ours
    assert config.max_length == 33
    assert config.num_labels == config.n_classes == len(config.id2label) == 4
    assert config.encoder_config("classification").n_classes == 4
    config.n_layers = 2
    assert config.num_hidden_layers == 2
    config.decoder_config().attention_options["linear"] = {"conv": 3}  # the options are copied
    assert config.attention_options == {}
    assert hf.UnrolledConfig(**theirs) != hf.UnrolledConfig(**theirs | {"hidden_size": 32})
    assert hf.UnrolledConfig(**theirs) == hf.UnrolledConfig(**theirs)
    assert GenerationConfig.from_model_config(config).max_length is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"atention": "linear"}, "atention is not a field of UnrolledConfig: did you mean attention"),
        ({"output": "masked"}, "output is not a field of UnrolledConfig"),
        ({"hidden_size": 32}, "hidden_size and d_model are the same field"),
        ({"n_layers": 0}, "n_layers is 0, but must be an integer of at least 1"),
        ({"num_attention_heads": 3, "n_heads": ...}, "d_model is 16, but must be a multiple of n_heads = 3"),
        ({"positions": "rope"}, "positions is 'rope', but must be one of"),
    ],
)
def test_a_wrong_field_gets_one_sentence(fields, sentence):
    values = {name: value for name, value in (SMALL | fields).items() if value is not ...}
    with pytest.raises(ValueError, match=sentence) as caught:
        hf.UnrolledConfig(**values)
    assert "\n" not in str(caught.value)


def adapted():
    model = make()
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["qkv_proj"]), model)
    return model


def test_a_config_that_could_not_be_loaded_is_not_saved(tmp_path):
    model = make()
    model.config.note = "mine"
    with pytest.raises(ValueError, match="the config has an attribute note, which is not a field"):
        model.save_pretrained(tmp_path)
    del model.config.note
    model.save_pretrained(tmp_path)
    assert hf.UnrolledForCausalLM.from_pretrained(tmp_path).config.decoder_config()


def test_what_is_pushed_to_a_hub_is_complete(tmp_path, monkeypatch):
    model, pushed = make(), []
    model.model.documents = {"vocabulary.json": {"kind": "ids"}}

    def push(self, repo_id, **options):
        assert digest.check(digest.weights_files(tmp_path / "book")) == self.model.documents
        pushed.append((repo_id, options))

    monkeypatch.setattr(PreTrainedModel, "push_to_hub", push)
    model.save_pretrained(tmp_path / "book")
    model.save_pretrained(tmp_path / "book", push_to_hub=True)
    model.save_pretrained(tmp_path / "book", push_to_hub=True, repo_id="me/x", private=True)
    assert pushed == [("book", {}), ("me/x", {"private": True})]


def test_a_model_of_the_hub_has_its_documents_and_is_checked(tmp_path):
    model, commit = make(), 40 * "a"
    model.model.documents = {"vocabulary.json": {"kind": "ids"}}
    stored = tmp_path / "models--me--book"  # as the hub's library stores what it has downloaded
    folder = stored / "snapshots" / commit
    model.save_pretrained(folder)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(commit)
    fetch = partial(hf.UnrolledForCausalLM.from_pretrained, cache_dir=tmp_path, local_files_only=True)
    assert fetch("me/book").model.documents == model.model.documents
    (folder / "vocabulary.json").write_text("{}")
    with pytest.raises(ValueError, match="changed"):
        fetch("me/book")
    with pytest.raises(OSError, match="find them in the cached files"):
        fetch("me/other")
    other = 40 * "b"
    make("softmax").save_pretrained(stored / "snapshots" / other)
    assert fetch("me/book", revision=other).config.attention == "softmax"


def test_a_model_in_a_subfolder_has_its_documents(tmp_path):
    model = make()
    model.model.documents = {"vocabulary.json": {"kind": "ids"}}
    model.save_pretrained(tmp_path / "book")
    again = hf.UnrolledForCausalLM.from_pretrained(tmp_path, subfolder="book")
    assert again.model.documents == model.model.documents


def test_only_the_main_process_changes_the_files(tmp_path):
    make().save_pretrained(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    (tmp_path / "model-00001-of-00002.safetensors").touch()  # as another process may be writing it
    make("softmax").save_pretrained(tmp_path, is_main_process=False)
    assert {file: file.read_bytes() for file in before} == before


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda ids: hf.from_transformers(adapted()), UnsupportedError, "has an adapter in"),
        (lambda ids: make().set_output_embeddings(torch.nn.Linear(2, 2)), UnsupportedError, "the vocabulary of a model is fixed"),
        (lambda ids: bare(is_decoder=False)(ids, cache=hf.StateCache()), UnsupportedError, "an encoder has no cache"),
        (lambda ids: bare()(ids, token_type_ids=ids), UnsupportedError, "a decoder has no segments"),
        (lambda ids: hf.from_transformers(bare()), UnsupportedError, "lacks its decoder's output layer"),
        (lambda ids: hf.UnrolledForCausalLM(hf.UnrolledConfig(d_model=16, n_heads=2)), ValueError, "vocab_size is None, but must be an integer"),
        (lambda ids: make("bigbird"), UnsupportedError, "'bigbird' attention cannot be causal"),
        (lambda ids: make()(ids, attention_mask=MASK[:, :3]), ValueError, r"attention_mask has shape \[2, 3\], but must have \[2, 7\]"),
        (lambda ids: make()(ids, attention_mask=torch.ones(2, 1, 7, 7)), UnsupportedError, r"only padding can be masked; use a mask \[batch, length\]"),
        (lambda ids: make()(ids + 17), ValueError, "17"),
        (lambda ids: make()(torch.full((1, 1), 17)), ValueError, "holds ids from 17 to 17, but they must be in"),
        *((lambda ids, kind=kind: make(kind=kind)(ids[0]), ValueError, r"input_ids has shape \[7\], but must have \[batch, length\]") for kind in CLASSES),
        (lambda ids: make()(ids, labels=ids, logits_to_keep=1), ValueError, "logits_to_keep is 1, but must be 0 with labels"),
        (lambda ids: make()(ids, logits_to_keep=torch.tensor([3])), ValueError, r"logits_to_keep is tensor\(\[3\]\), but must be an integer"),
        (lambda ids: make().resize_token_embeddings(20), UnsupportedError, "the vocabulary of a model is fixed"),
        (lambda ids: make(output_hidden_states=True)(ids), UnsupportedError, "output_hidden_states is given, but not supported"),
        (lambda ids: make().set_input_embeddings(None), UnsupportedError, "the vocabulary of a model is fixed"),
    ],
)  # fmt: skip
def test_what_a_model_does_not_support_is_refused(call, error, message, ids):
    with pytest.raises(error, match=message):
        call(ids)


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_logits_that_are_kept_are_those_of_the_last_positions(use_cache, ids):
    model = make()
    expected = model(ids, attention_mask=MASK, use_cache=use_cache).logits
    found = model(ids, attention_mask=MASK, use_cache=use_cache, logits_to_keep=2).logits
    torch.testing.assert_close(found, expected[:, -2:])


@pytest.mark.parametrize(
    "name", ["model", "model.positions", "model.stack.blocks.1", "model.stack.blocks.0.attention"]
)
def test_hooks_are_called_or_refused(name, ids):
    model, calls = make(), []
    hook = model.get_submodule(name).register_forward_hook(lambda *_: calls.append(name))
    for call in (model, partial(model.generate, max_new_tokens=2)):
        with pytest.raises(UnsupportedError, match=f"{name} has a hook .* with use_cache=False"):
            call(ids)
    assert not calls
    model(ids, labels=ids)
    model(ids, use_cache=False)
    model.generate(ids, max_new_tokens=2, use_cache=False)
    assert calls == [name] * 4
    hook.remove()
    hook = model.get_submodule(name).register_full_backward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=f"{name} has a hook"):
        model(ids)
    hook.remove()
    hook = model.get_submodule(name).register_forward_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=f"{name} has a hook"):
        model(ids)
    hook.remove()
    add_hook_to_module(model.get_submodule(name), ModelHook())  # which replaces its forward
    with pytest.raises(UnsupportedError, match=f"{name} has a hook or a forward of its own"):
        model(ids)
    remove_hook_from_module(model.get_submodule(name))
    del model.get_submodule(name).forward  # the one of its class, which remains as an attribute
    model.model.stack.blocks[0].ff.register_forward_hook(lambda *_: calls.append("ff"))
    model(ids)
    assert calls[4:] == ["ff"]


def test_embeddings_are_found():
    model = make()
    assert model.get_input_embeddings() is model.model.embedding
    assert model.get_output_embeddings() is model.model.head.project


def test_the_base_model_has_the_same_weights_but_no_output_layer(ids):
    """Trainers of trl compute the logits themselves, of the hidden vectors of `base_model`."""
    model = make().train()
    base = model.base_model
    assert (type(base), base.training, model.get_decoder().config) == (hf.UnrolledModel, True, model.config)
    hidden = base(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden)
    torch.testing.assert_close(logits, model(ids).logits)
    found, expected = (
        torch.autograd.grad(x.square().sum(), [*model.parameters()]) for x in (logits, model(ids).logits)
    )
    torch.testing.assert_close(found, expected)
    assert not any(name.startswith("base_model") for name in model.state_dict())


def test_a_field_of_the_other_kind_of_model_is_refused():
    for name, value in {
        "n_segments": 2,
        "embedding_norm": True,
        "pooling": "first",
        "head_hidden": 8,
    }.items():
        with pytest.raises(ValueError, match=f"{name} is .*, but a decoder has no such field; leave it out"):
            make(**{name: value})
    with pytest.raises(ValueError, match="start_token is True, but an encoder has no such field"):
        make(kind=hf.UnrolledForMaskedLM, start_token=True)


def test_a_model_is_exported_with_a_mask(ids):
    model, mask = make(), torch.ones_like(ids)
    program = torch.export.export(model, (ids,), {"attention_mask": mask, "use_cache": False}, strict=False)
    mask[0, :3] = 0
    found = program.module()(ids, attention_mask=mask, use_cache=False).logits
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found[mask == 1], expected[mask == 1])


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_arguments_of_other_models_may_be_given_but_not_used(kind, ids):
    model = make(kind=kind)
    found = model(ids, inputs_embeds=None, output_attentions=False).logits
    assert torch.equal(found, model(ids).logits)
    model.config.return_dict = False
    assert torch.equal(model(ids)[0], found)
    assert isinstance(model(ids), tuple)
    for others in ({"position_ids": ids}, {"output_hidden_states": True}):
        with pytest.raises(UnsupportedError, match=f"{next(iter(others))} is given, but not supported"):
            model(ids, **others)


@pytest.mark.parametrize("kind", [hf.UnrolledForMaskedLM, hf.UnrolledForSequenceClassification])
def test_token_types_are_segments(kind, ids):
    model = make(kind=kind, n_segments=2)
    kinds = (torch.arange(7) > 3).long().expand(2, -1)
    found = model(ids, token_type_ids=kinds).logits
    assert torch.equal(found, model.model(ids, segments=kinds))
    assert not torch.equal(found, model(ids).logits)
    with pytest.raises(ValueError, match="but must be None for a model whose n_segments is 0"):
        make(kind=kind)(ids, token_type_ids=kinds)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_adapters_of_peft_are_in_the_forward_and_in_every_step(name, ids):
    model = make(name)
    before = model(ids).logits
    settings = peft.LoraConfig(target_modules=["qkv_proj", "out_proj", "up"], r=2, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, settings).double().eval()
    for key, x in adapted.named_parameters():
        if "lora_" in key:
            x.data.normal_(std=0.3)
    with torch.no_grad():
        whole = adapted(input_ids=ids, use_cache=False).logits
        cache, steps = None, []
        for t in range(7):
            out = adapted(input_ids=ids[:, t : t + 1], cache=cache, use_cache=True)
            cache = out.cache
            steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-10)
    assert (whole - before).abs().max() > 0.1


def test_a_damaged_folder_gets_one_sentence(tmp_path):
    make().save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, text = weights.read_bytes(), config.read_text()
    weights.write_bytes(whole[:1000])
    with pytest.raises(ValueError, match=r"is not a readable safetensors file"):
        hf.UnrolledForCausalLM.from_pretrained(tmp_path)
    weights.write_bytes(whole)
    fields = json.loads(text)
    config.write_text(json.dumps({name: x for name, x in fields.items() if name != "n_heads"}))
    with pytest.raises(ValueError, match=r"config.json lacks the keys \['n_heads'\]"):
        hf.UnrolledForCausalLM.from_pretrained(tmp_path)
    config.write_text(json.dumps(fields | {"n_layers": 3, "attention": "linear"}))
    with pytest.raises(ValueError, match=r"model\.safetensors or config\.json was changed after"):
        hf.UnrolledForCausalLM.from_pretrained(tmp_path)
    for free in ({"id2label": {"0": "good", "1": "bad"}}, {"transformers_version": "5"}, {"auto_map": {}}):
        config.write_text(json.dumps(fields | free))  # only names
        hf.UnrolledForCausalLM.from_pretrained(tmp_path)
    config.write_text(json.dumps(fields | {"n_layers": 3, "attention": "linear"}))
    save_file(load(whole), weights, {"format": "pt"})  # as another program writes it: without a digest
    with pytest.raises(
        ValueError, match=r"lacks 12 tensors of UnrolledForCausalLM, the first is 'model\.stack"
    ):
        hf.UnrolledForCausalLM.from_pretrained(tmp_path)
    config.write_text(json.dumps(fields | {"attention": "bigbird"}))
    with pytest.raises(ValueError, match="cannot be loaded: 'bigbird' attention cannot be causal"):
        hf.load(tmp_path)
    weights.rename(tmp_path / "pytorch_model.bin")
    config.write_text(text)
    with pytest.raises(OSError, match=r"no file named .*safetensors"):
        hf.UnrolledForCausalLM.from_pretrained(tmp_path, use_safetensors=False)

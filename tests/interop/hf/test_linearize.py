"""Linearized models of transformers: kept weights, replaced attention, generation and saving."""

import copy
import json
import pickle
import subprocess
import sys

import huggingface_hub
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from unrolled import attention
from unrolled.attention.retention import log_gamma, retention_reference
from unrolled.contract import UnsupportedError
from unrolled.interop import hf
from unrolled.interop.hf import digest
from unrolled.interop.hf.linearize import linearized_layers
from unrolled.interop.hf.linearized_attention import LinearizedAttention, padding_of
from unrolled.ops.state import leaves
from unrolled.testing._kit import assert_identical, with_gradients

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 50, "max_position_embeddings": 128}
GROUPED = TEXT | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
GPT2 |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None, "scale_attn_by_inverse_layer_idx": True}
MODELS = {
    "llama": ("Llama", "ForCausalLM", GROUPED),
    "llama-bias": ("Llama", "ForCausalLM", GROUPED | {"attention_bias": True, "head_dim": 12}),
    "mistral": ("Mistral", "ForCausalLM", GROUPED | {"sliding_window": None}),
    "qwen2": ("Qwen2", "ForCausalLM", GROUPED),
    "qwen3": ("Qwen3", "ForCausalLM", GROUPED | {"head_dim": 8}),
    "gpt2": ("GPT2", "LMHeadModel", GPT2),
    "bert": ("Bert", "ForMaskedLM", TEXT),
    "vit": ("ViT", "ForImageClassification", SIZES | {"image_size": 16, "patch_size": 4}),
}
CAUSAL = ["llama", "qwen3", "gpt2"]


def initial(family, head, fields):
    """Make a model of transformers with the weights of its initialisation."""
    config = getattr(transformers, f"{family}Config")(**fields)
    return getattr(transformers, family + head)(config).eval()


def make(name):
    """Make a small model whose attention is far from uniform."""
    torch.manual_seed(0)
    model = initial(*MODELS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


def inputs(name, padded="left"):
    """Make a batch of two for a model, the first row shorter."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    tokens = torch.ones(2, 9, dtype=torch.long)
    tokens[0, slice(None, 3) if padded == "left" else slice(6, None)] = 0
    ids = torch.randint(1, 50, (2, 9), generator=generator)
    return {"input_ids": ids * tokens, "attention_mask": tokens}


def logits(model, given):
    """Return the logits at valid tokens."""
    with torch.no_grad():
        found = model(**given).logits
    return found[given["attention_mask"].bool()] if "attention_mask" in given else found


@pytest.mark.parametrize("padded", ["left", "right"])
@pytest.mark.parametrize("layers", [None, [1]], ids=["all layers", "one layer"])
@pytest.mark.parametrize("name", MODELS)
def test_replacing_softmax_by_softmax_changes_nothing(name, layers, padded):
    model, given = make(name), inputs(name, padded)
    expected = logits(model, given)
    found = logits(hf.linearize(model, "softmax", layers), given)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_masks_of_eager_attention_are_accepted():
    model, given = make("llama"), inputs("llama")
    model.set_attn_implementation("eager")
    expected = logits(model, given)
    found = logits(hf.linearize(model, "softmax", [0, 2]), given)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def plain_linear(module, query, key, value, mask, scaling, dropout=0.0, **further):
    """Linear attention by its definition, quadratic, as an attention function of transformers."""
    groups = query.shape[1] // key.shape[1]
    q, k = (
        torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (query, key.repeat_interleave(groups, 1))
    )
    weights = q @ k.transpose(-1, -2)
    if module.is_causal:
        weights = weights.tril()
    if mask is not None:
        weights = weights * mask[:, None, None, :]
    o = weights @ value.repeat_interleave(groups, 1) / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    return o.transpose(1, 2), None


@pytest.mark.parametrize("name", ["llama", "qwen3", "bert", "vit"])
def test_linear_attention_equals_its_definition(name):
    from transformers.masking_utils import flash_attention_mask

    model, given = make(name), inputs(name)
    ours = hf.linearize(copy.deepcopy(model), "linear")
    transformers.AttentionInterface.register("plain_linear", plain_linear)
    transformers.AttentionMaskInterface.register("plain_linear", flash_attention_mask)
    softmax = logits(model, given)
    model.config._attn_implementation = "plain_linear"
    expected = logits(model, given)
    torch.testing.assert_close(logits(ours, given), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(softmax, expected, atol=1e-2)


def test_retention_adds_no_rotation_to_that_of_the_model():
    model, given = make("llama"), inputs("llama")
    layer = hf.linearize(model, "retention").model.layers[0].self_attn
    assert not layer.mechanism.rotary
    seen = {}
    layer.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    model(given["input_ids"][1:], use_cache=False)
    q, k, v = layer._project(seen["hidden_states"], seen["position_embeddings"])
    expected = retention_reference(q, k, v, log_gamma(k.shape[2]).to(q.dtype))
    torch.testing.assert_close(layer(**seen)[0], layer.mechanism.merge_heads(expected, seen["hidden_states"]))


def test_frozen_weights_stay_frozen():
    model = make("gpt2").requires_grad_(False)
    model.transformer.h[1].attn.requires_grad_(True)
    with torch.no_grad():
        hf.linearize(model, "linear")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {
        name for name, _ in model.named_parameters() if name.startswith("transformer.h.1.attn")
    }


def test_the_projections_are_kept_bit_for_bit():
    model = make("qwen2")
    before = model.model.layers[1].self_attn
    q, k, v, bias = before.q_proj.weight, before.k_proj.weight, before.v_proj.weight, before.v_proj.bias
    after = hf.linearize(model, "linear", [1]).model.layers[1].self_attn
    assert isinstance(after, LinearizedAttention)
    assert torch.equal(after.mechanism.qkv_proj.weight, torch.cat([q, k, v]))
    assert torch.equal(after.mechanism.qkv_proj.bias[-len(bias) :], bias)
    assert torch.equal(after.mechanism.out_proj.weight, before.o_proj.weight)
    assert after.mechanism.out_proj.bias is None


def test_another_model_of_the_same_config_is_left_alone():
    config = transformers.LlamaConfig(**GROUPED)
    one, other = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    expected = logits(other, inputs("llama"))
    hf.linearize(one)
    assert torch.equal(logits(other, inputs("llama")), expected)
    assert not hasattr(other.config, "unrolled_attention")


OPTIONS = {
    "window": {"window": 4},
    "longformer": {"window": 4},
    "aft": {"max_length": 128},
    "mamba2": {"n_groups": 4},
}

UNGROUPED = {"aft", "mamba2"}  # take as many heads of keys as of queries
OTHER_PROJECTIONS = {"mamba", "reformer"}


RECURRENT = [x for x in attention.names() if attention.load(x).supports.recurrence != "none"]


@pytest.mark.parametrize("name", [x for x in RECURRENT if x not in OTHER_PROJECTIONS])
def test_every_recurrent_mechanism_continues_in_chunks(name):
    model, given = make("gpt2" if name in UNGROUPED else "llama"), inputs("llama")
    hf.linearize(model, name, **OPTIONS.get(name, {}))
    with torch.no_grad():
        expected = model(**given).logits
        cache, found = None, []
        for start, end in [(0, 4), (4, 7), (7, 8), (8, 9)]:
            ids, mask = given["input_ids"][:, start:end], given["attention_mask"][:, :end]
            out = model(ids, attention_mask=mask, cache=cache, use_cache=True)
            cache, found = out.cache, [*found, out.logits]
    keep = given["attention_mask"].bool()
    torch.testing.assert_close(torch.cat(found, 1)[keep], expected[keep], atol=1e-4, rtol=1e-4)
    assert cache.get_seq_length() == 9


@pytest.fixture(scope="module")
def linear():
    return {name: hf.linearize(make(name), "linear", feature_map="hedgehog") for name in CAUSAL}


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True}], ids=str
)
@pytest.mark.parametrize("name", CAUSAL)
def test_generating_with_and_without_states_gives_the_same_tokens(linear, name, how):
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        settings = {"do_sample": False, "max_new_tokens": 12, "use_cache": use_cache} | how
        found.append(linear[name].generate(**inputs(name), **settings))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_padded_row_generates_as_it_does_alone(linear, name):
    given = inputs(name)
    together = linear[name].generate(**given, max_new_tokens=8, do_sample=False)
    alone = linear[name].generate(given["input_ids"][:1, 3:], max_new_tokens=8, do_sample=False)
    assert torch.equal(together[:1, 3:], alone)


def test_generating_continues_a_state(linear):
    model, ids = linear["llama"], inputs("llama")["input_ids"][1:]
    whole = model.generate(ids, max_new_tokens=10, do_sample=False)
    first = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    rest = model.generate(first.sequences, cache=first.cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(rest, whole)


def test_a_cache_of_the_caller_holds_the_states(linear):
    model, ids = linear["qwen3"], inputs("qwen3")["input_ids"][1:]
    cache = DynamicCache(config=model.config)
    parts = [model(part, cache=cache).logits for part in ids.split([5, 1, 3], 1)]
    assert cache.get_seq_length() == 9
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits)


@pytest.mark.slow
def test_another_process_that_unpickles_a_model_honours_padding(linear, tmp_path):
    model, given = linear["llama"], inputs("llama")
    torch.save((model, given, model(**given).logits), tmp_path / "model.pt")
    read = f"import torch; model, given, expected = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); "
    compare = "assert torch.equal(model(**given).logits, expected)"
    subprocess.run([sys.executable, "-c", read + compare], check=True)


def test_assisted_decoding_is_refused(linear):
    ids = inputs("llama")["input_ids"][1:]
    with pytest.raises(ValueError, match="stateful"):
        linear["llama"].generate(ids, assistant_model=make("llama"), max_new_tokens=3)


def test_the_cache_holds_states_where_layers_were_replaced():
    model = hf.linearize(make("llama"), "linear", [0, 2])
    ids = inputs("llama")["input_ids"]
    sizes = []
    for length in (4, 40):
        cache = model.generate(
            ids, max_new_tokens=length, do_sample=False, return_dict_in_generate=True
        ).cache
        assert isinstance(cache, hf.StateCache)
        assert [type(layer) for layer in cache.layers] == [hf.StateLayer, DynamicLayer, hf.StateLayer]
        sizes.append([cache.layers[0].nbytes(), cache.nbytes()])
    assert sizes[0][0] == sizes[1][0]
    assert sizes[0][1] < sizes[1][1]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_a_saved_model_is_read_back_bit_for_bit(name, tmp_path):
    model, given = make(name), inputs(name)
    hf.linearize(model, "linear", [0], feature_map="t2r")
    other, options = ("nystromformer", {}) if name == "vit" else ("window", {"window": 4})
    hf.linearize(model, other, [2], **options)
    earlier = copy.deepcopy(model)
    torch.nn.init.normal_(next(earlier.parameters()))
    earlier.save_pretrained(tmp_path)  # one file, which transformers leaves beside the shards
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    record = json.loads((tmp_path / "config.json").read_text())["unrolled_attention"]
    assert record["0"] == {"attention": "linear", "options": {"feature_map": "t2r"}}
    read = hf.load_linearized(tmp_path)
    assert type(read) is type(model)
    assert torch.equal(logits(read, given), logits(model, given))


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}])
def test_only_the_weights_of_the_last_save_are_loaded(options, tmp_path):
    model, others = hf.linearize(make("llama")), hf.linearize(make("llama"))
    torch.nn.init.normal_(others.lm_head.weight)
    others.save_pretrained(tmp_path, **({} if options else {"max_shard_size": "20KB"}))
    others.save_pretrained(tmp_path, variant="v2")
    model.save_pretrained(tmp_path, **options)
    digest.seal(tmp_path)
    assert torch.equal(hf.load_linearized(tmp_path).lm_head.weight, model.lm_head.weight)
    (tmp_path / "model.v2.safetensors").write_bytes(b"damaged")
    hf.load_linearized(tmp_path)


def test_transformers_refuses_a_saved_model_rather_than_make_a_softmax_model(tmp_path):
    model = hf.linearize(make("llama"), "linear")
    model.generation_config.max_new_tokens = 3
    copy.deepcopy(model).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model type `unrolled-linearized`"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == "llama"  # by which the rest of transformers goes
    assert pickle.loads(pickle.dumps(model.config)).to_dict() == model.config.to_dict()
    again = hf.load_linearized(tmp_path)
    assert again.generation_config.max_new_tokens == 3
    again.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["model_type"], written["linearized_model_type"]) == ("unrolled-linearized", "llama")
    written["model_type"] = "llama"  # as it was written once
    del written["linearized_model_type"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert not hasattr(hf.load_linearized(tmp_path).config, "linearized_model_type")


def test_unreadable_folders_are_refused(tmp_path):
    model, file = make("llama"), tmp_path / "model.safetensors"

    def refuses(message, path=tmp_path):
        with pytest.raises(ValueError, match=message):
            hf.load_linearized(path)

    model.save_pretrained(tmp_path)
    refuses("was not linearized: load it with from_pretrained")
    hf.linearize(model).save_pretrained(tmp_path)
    whole = load_file(file)
    less = {name: x for name, x in whole.items() if name != "model.norm.weight"}
    for weights, sentence in (
        (less, r"it lacks \['model.norm.weight'\] and has the unknown \[\]"),
        (whole | {"model.more": torch.zeros(2)}, r"it lacks \[\] and has the unknown \['model.more'\]"),
        (whole | {"model.norm.weight": torch.zeros(2)}, r"has shape \[2\], but must have \[32\]"),
    ):
        save_file(weights, file, {"format": "pt"})  # as another program writes it: without a digest
        refuses(sentence)
    file.write_bytes(file.read_bytes()[:1000])
    refuses("is not a readable safetensors file")
    file.rename(tmp_path / "pytorch_model.bin")
    refuses(r"has no model\.safetensors")
    refuses("cannot be read as a model of transformers", tmp_path.parent)


@pytest.mark.parametrize(("name", "sentence"), [("some/name", "could be fetched"), ("a b", "nor the name")])
def test_a_name_on_the_hub_without_a_network_gets_a_sentence(name, sentence, monkeypatch):
    def no_network(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", no_network)
    monkeypatch.setattr(huggingface_hub.HfApi, "snapshot_download", no_network)
    with pytest.raises(ValueError, match=sentence):
        hf.load_linearized(name)


def test_half_precision_is_kept(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**GROUPED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    hf.linearize(model, "linear", feature_map="hedgehog")
    model.save_pretrained(tmp_path)
    read = hf.load_linearized(tmp_path)
    assert {x.dtype for x in read.parameters()} == {torch.bfloat16}
    given = inputs("llama")
    assert torch.equal(logits(read, given), logits(model, given))
    assert read.generate(**given, max_new_tokens=5, do_sample=False).shape == (2, 14)


def test_a_bert_decoder_has_states():
    torch.manual_seed(0)
    model = initial("Bert", "LMHeadModel", TEXT | {"is_decoder": True, "eos_token_id": None})
    hf.linearize(model)
    ids = inputs("llama")["input_ids"][1:]
    cached, plain = (
        model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert torch.equal(cached, plain)
    assert isinstance(model(ids, use_cache=True).cache, hf.StateCache)


@pytest.mark.parametrize("layers", [None, [0]], ids=["all layers", "one layer"])
def test_packed_sequences_are_refused(layers):
    model = hf.linearize(make("llama"), "linear", layers)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    ids = inputs("llama")["input_ids"][1:]
    for use_cache in (False, True):
        with pytest.raises(UnsupportedError, match="packed sequences"):
            model(ids, position_ids=positions, use_cache=use_cache)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="got cu_seq_lens_q, but cannot keep packed sequences apart"):
        model(ids, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)


def test_a_cache_of_keys_and_values_is_refused():
    model, ids = make("llama"), inputs("llama")["input_ids"]
    cache = model(ids, use_cache=True).cache
    assert isinstance(cache, DynamicCache)
    with pytest.raises(ValueError, match="holds a DynamicLayer for layer 0"):
        hf.linearize(model)(ids, cache=cache)


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"attention": "linaer"}, ValueError, "attention is 'linaer'"),
        ({"layers": [3]}, ValueError, r"layers is \[3\], but must be different numbers from 0 to 2"),
        ({"layers": [0, 0]}, ValueError, r"layers is \[0, 0\]"),
        ({"layers": []}, ValueError, r"layers is \[\]"),
        ({"window": 3}, ValueError, "linear attention has no option 'window'; its options are feature_map,"),
        ({"feature_map_options": 3}, ValueError, "feature_map_options is 3, but must map names to values"),
        ({"feature_map": torch.nn.ReLU()}, ValueError, "options must be JSON-serialisable"),
        ({"rotary": True}, ValueError, "rotary is True, but must be left out"),
        ({"rotary_base": 5.0}, ValueError, "rotary_base is 5.0, but must be left out"),
        ({"bias": False}, ValueError, "bias is False, but must be left out: the model keeps its own"),
        ({"qk_norm": "head"}, ValueError, "qk_norm is 'head', but must be left out"),
        ({"attention": "linformer", "max_length": 8}, UnsupportedError, "linformer attention is not causal"),
    ],
)
def test_wrong_arguments_are_refused(given, error, sentence):
    model = make("llama")
    with pytest.raises(error, match=sentence):
        hf.linearize(model, **given)
    assert not any(isinstance(module, LinearizedAttention) for module in model.modules())


def test_an_adapter_in_a_replaced_layer_must_be_merged_first():
    model, ids = make("llama"), torch.tensor([[3, 1, 4, 1, 5]])
    where = {"target_modules": ["v_proj"], "layers_to_transform": [1]}
    peft.inject_adapter_in_model(peft.LoraConfig(**where, init_lora_weights=False), model)
    expected = model(ids).logits
    with pytest.raises(
        UnsupportedError, match="LlamaAttention has an adapter in v_proj, which would be lost"
    ):
        hf.linearize(model, "softmax")
    assert torch.equal(model(ids).logits, expected)
    torch.testing.assert_close(hf.linearize(model, "softmax", layers=[0])(ids).logits, expected)


LOWER = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
DISTANCE = torch.arange(5.0) - torch.arange(5.0)[:, None]  # as ALiBi adds it


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: hf.linearize(torch.nn.Linear(2, 2)), UnsupportedError, "Linear has no attention to replace"),
        (lambda: hf.linearize(peft.LoraModel(make("llama"), peft.LoraConfig(target_modules=["v_proj"]), "new")), UnsupportedError, r"LoraModel is a wrapper of peft: .* merge_and_unload\(\)"),
        (lambda: hf.linearize(initial("Mistral", "ForCausalLM", GROUPED | {"sliding_window": 8})), UnsupportedError, "sliding window of 8 tokens"),
        (lambda: hf.linearize(initial("GPT2", "LMHeadModel", GPT2 | {"add_cross_attention": True})), UnsupportedError, "cross-attention"),
        (lambda: hf.linearize(make("gpt2"), "reformer"), UnsupportedError, "reformer attention has projections of other shapes"),
        (lambda: hf.linearize(make("gpt2"), "mamba"), UnsupportedError, "mamba attention has projections of other shapes"),
        (lambda: hf.linearize(hf.linearize(make("llama"), layers=[1])), ValueError, "layer 1 was replaced before"),
        (lambda: padding_of(LOWER.triu(-1), 5, causal=True), UnsupportedError, "more than padding"),
        (lambda: padding_of(LOWER.float().log() + DISTANCE, 5, causal=True), UnsupportedError, "adds finite numbers to the scores"),
        (lambda: padding_of(torch.full((1, 1, 5, 5), -1e4), 5, causal=False), UnsupportedError, "adds finite numbers to the scores"),
        (lambda: padding_of(torch.ones(5), 5, causal=True), UnsupportedError, r"must be \[B, S\]"),
    ],
)  # fmt: skip
def test_models_and_masks_that_cannot_be_linearized_are_refused(call, error, message):
    assert padding_of(LOWER, 5, causal=True) is None
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_padding_is_found_in_masks_of_every_type(dtype):
    padding = torch.tensor([[True, True, False, False, False], [False] * 5])
    hidden = ~LOWER | padding[:, None, None]
    for lowest in (-torch.inf, torch.finfo(dtype).min):
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, lowest)
        assert torch.equal(padding_of(mask, 5, causal=True), padding)


def test_new_parameters_get_gradients_with_and_without_checkpointing():
    found = []
    for checkpointing in (False, True):
        model = hf.linearize(make("llama"), "linear", feature_map="hedgehog").train()
        if checkpointing:
            model.activation_checkpointing_enable()
        ids = inputs("llama")["input_ids"]
        model(ids, labels=ids).loss.backward()
        found.append([parameter.grad for parameter in hf.new_parameters(model).values()])
    assert len(found[0]) == 3 * 4  # layers, and W and b of queries and keys
    for plain, recomputed in zip(*found, strict=True):
        assert plain.abs().max() > 0
        torch.testing.assert_close(recomputed, plain)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_values_at_padding_affect_neither_outputs_nor_gradients(name, value):
    model = hf.linearize(make(name), "linear")
    layer = next(module for module in model.modules() if isinstance(module, LinearizedAttention))
    layer.rotary = False
    mask, width = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]), layer.mechanism.d_model
    x = torch.randn(2, 4, width, generator=torch.Generator().manual_seed(2)).requires_grad_()
    loud = x.detach().masked_fill(mask.unsqueeze(-1) == 0, value).requires_grad_()
    found, expected = (
        with_gradients(layer, layer(given, attention_mask=mask)[0][mask.bool()], x=given)
        for given in (loud, x)
    )
    assert_identical(found, expected, f"padding that holds {value}")


def test_a_linearized_model_is_exported_with_a_mask():
    model = hf.linearize(make("llama"), "linear")
    ids = torch.randint(1, 50, (2, 9))
    mask = torch.ones_like(ids)
    program = torch.export.export(
        model, (), {"input_ids": ids, "attention_mask": mask, "use_cache": False}, strict=False
    )
    mask[0, :3] = 0
    given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    found, expected = program.module()(**given).logits, model(**given).logits
    torch.testing.assert_close(found[mask == 1], expected[mask == 1])
    with pytest.raises(UnsupportedError, match="position_ids may be those of packed sequences"):
        torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)


@pytest.mark.parametrize("mode", [True, False])
def test_replaced_layers_are_in_the_mode_of_the_model(mode):
    linear = hf.linearize(make("llama").train(mode))
    assert {module.training for module in linear.modules()} == {mode}


def test_no_states_are_made_in_training_or_where_none_are_wanted():
    linear, given = hf.linearize(make("llama")), inputs("llama")
    assert linear.train()(**given).cache is None
    assert isinstance(linear.eval()(**given).cache, hf.StateCache)
    assert linear(**given, use_cache=False).cache is None
    linear.config.use_cache = False
    assert linear(**given).cache is None
    assert isinstance(linear(**given, use_cache=True).cache, hf.StateCache)


@pytest.mark.parametrize(
    ("name", "rate"), [("gpt2", {"resid_pdrop": 1.0}), ("bert", {"hidden_dropout_prob": 1.0})]
)
def test_the_output_of_a_replaced_layer_keeps_its_dropout(name, rate):
    family, head, fields = MODELS[name]
    model = hf.linearize(initial(family, head, fields | rate), layers=[0])
    [layer] = linearized_layers(model).values()
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    assert layer(x)[0].abs().max() > 0
    dropped = torch.nn.functional.layer_norm(x, [32], eps=1e-12) if name == "bert" else torch.zeros_like(x)
    torch.testing.assert_close(layer.train()(x)[0], dropped)


def test_settings_of_generation_are_read_back(tmp_path):
    linear = hf.linearize(make("llama"))
    linear.generation_config.max_new_tokens = 7
    linear.save_pretrained(tmp_path)
    found = hf.load_linearized(tmp_path)
    assert found.generation_config.max_new_tokens == 7
    assert found.generate(torch.tensor([[5, 6]])).shape == (1, 2 + 7)


@torch.no_grad()
def test_a_single_padded_token_leaves_the_state_of_its_row():
    linear, given = hf.linearize(make("llama")), inputs("llama")
    cache = linear(**given, use_cache=True).cache
    before = [x[0].clone() for x in leaves(cache.layers[0].state).values()]
    mask = torch.cat([given["attention_mask"], torch.tensor([[0], [1]])], 1)
    linear(input_ids=torch.tensor([[5], [6]]), attention_mask=mask, cache=cache)
    after = [x[0] for x in leaves(cache.layers[0].state).values()]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "cannot be read as a model of transformers: "),
        (
            {"model_type": [3]},
            "cannot be read as a model of transformers: it has no config with a model_type",
        ),
        ({"hidden_size": "x"}, "cannot be read as a model of transformers: "),
        ({"num_attention_heads": 0}, "cannot be read as a model of transformers: "),
        ({"architectures": ["LlamaConfig"]}, "has the class 'LlamaConfig', which is no model of"),
        ({"unrolled_attention": [1]}, "unrolled_attention in the config of .* is damaged"),
        ({"unrolled_attention": {"0": {}}}, "unrolled_attention in the config of .* is damaged"),
    ],
)
def test_a_damaged_config_is_named(changes, message, tmp_path):
    hf.linearize(make("llama")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(None if changes is None else config | changes))
    with pytest.raises(ValueError, match=message):
        hf.load_linearized(tmp_path)


def test_only_layers_with_a_window_are_refused():
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    model = initial("Qwen2", "ForCausalLM", GROUPED | windows)
    replaced = hf.linearize(model, layers=[0, 1]).modules()
    assert len([x for x in replaced if isinstance(x, LinearizedAttention)]) == 2
    with pytest.raises(UnsupportedError, match="sliding window of 8 tokens"):
        hf.linearize(model, layers=[2])

"""Models of transformers on our kernels: the same logits, gradients, tokens and caches, and back again."""

import copy
import io
from functools import partial

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn

from unrolled.contract import UnsupportedError
from unrolled.interop import hf
from unrolled.interop.hf.accelerate.rebind import rebound

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
TEXT = SIZES | IDS | {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = TEXT | LAYERS | {"head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA_MOE = DELTA | MOE | {"num_experts": 4, "shared_expert_intermediate_size": 16}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
SSD = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8}
FAMILIES = {
    "Qwen3Next": DELTA_MOE,
    "Qwen3_5": DELTA,
    "Qwen3_5Moe": DELTA_MOE,
    "OlmoHybrid": DELTA | {"linear_num_key_heads": 4, "linear_allow_neg_eigval": True},
    "KimiLinear": TEXT | LAYERS | MOE | LATENT | {"linear_num_heads": 4, "linear_head_dim": 8}
    | {"num_key_value_heads": 4},
    "Mamba2": SIZES | IDS | {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1, "chunk_size": 8},
    "FalconH1": TEXT | SSD | {"mamba_d_ssm": 64},
    "NemotronH": TEXT | {"layer_types": ["mamba", "full_attention", "mamba"], "head_dim": 8, "chunk_size": 8}
    | {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16},
    "Bamba": TEXT | SSD | {"attn_layer_indices": [1]},
    "GraniteMoeHybrid": TEXT | SSD | MOE | {"layer_types": ["mamba", "attention", "mamba"]}
    | {"shared_intermediate_size": 16},
    "Zamba2": TEXT | {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_mem_blocks": 1, "chunk_size": 8}
    | {"n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 2, "mamba_d_state": 16},
    "Lfm2": TEXT | {"layer_types": ["conv", "full_attention", "conv"]},
    "MiniMax": TEXT | LAYERS | MOE | {"block_size": 8},
    "Mamba": SIZES | IDS | {"state_size": 8},
    "FalconMamba": SIZES | IDS | {"state_size": 8},
    "Jamba": TEXT | {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8},
    "Zamba": TEXT | {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4}
    | {"mamba_d_state": 8, "n_mamba_heads": 2},
}  # fmt: skip
TEXT_CONFIG = ("Qwen3_5", "Qwen3_5Moe")


def make(family):
    """Make a small model in evaluation mode."""
    torch.manual_seed(0)
    name = f"{family}TextConfig" if family in TEXT_CONFIG else f"{family}Config"
    config = getattr(transformers, name)(**FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    return model


def inputs(length=21, rows=2):
    """A batch whose second row is padded on the left."""
    ids = torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(1))
    tokens = torch.ones_like(ids)
    tokens[1:, :5] = 0
    return {"input_ids": ids * tokens, "attention_mask": tokens}


def logits(model, given):
    with torch.no_grad():
        return model(**given).logits[given["attention_mask"].bool()]


def gradients(model, given):
    """The gradients of all weights in training mode."""
    model.train()
    model.zero_grad()
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    model(**given, labels=labels, use_cache=False).loss.backward()
    model.eval()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def generate(model, given):
    return model.generate(
        **given, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True
    )


def states(cache):
    """All states of a cache, by name."""
    found = {f"linear {i}": x for i, x in enumerate(getattr(cache, "linear_cache", [])) if torch.is_tensor(x)}
    for i, layer in enumerate(cache.layers):
        for kind in ("conv_states", "recurrent_states"):
            of_layer = getattr(layer, kind, {})
            found |= {f"{kind} {i} {j}": x for j, x in of_layer.items() if x is not None}
    return found


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_those_of_transformers(family):
    model, given = make(family), inputs()
    before = logits(model, given)
    slopes, generated = gradients(model, given), generate(model, given)
    report = hf.accelerate(model)
    accelerated = logits(model, given)
    assert all(layer.replaced for layer in report.layers)
    assert not any(layer.kept for layer in report.layers)
    assert not torch.equal(accelerated, before)  # other code ran
    assert_close(accelerated, before)
    assert_close(gradients(model, given), slopes)
    again = generate(model, given)
    assert torch.equal(again.sequences, generated.sequences)
    assert_close(again.logits, generated.logits)
    assert states(again.cache)
    assert_close(states(again.cache), states(generated.cache))
    hf.restore(model)
    assert torch.equal(logits(model, given), before)
    assert not any("forward" in vars(layer) for layer in model.modules())


FP64 = ["Qwen3_5", "OlmoHybrid", "KimiLinear", "Mamba2", "FalconH1", "MiniMax", "Mamba"]


@pytest.mark.parametrize("family", FP64)
def test_results_in_fp64_are_those_of_transformers(family):
    model, given = make(family).double(), inputs()
    model.set_experts_implementation("eager")  # the default for experts has no fp64
    before, slopes, generated = logits(model, given), gradients(model, given), generate(model, given)
    hf.accelerate(model)
    assert_close(logits(model, given), before)
    assert_close(gradients(model, given), slopes)
    again = generate(model, given)
    assert torch.equal(again.sequences, generated.sequences)
    assert_close(again.logits, generated.logits)


@pytest.mark.parametrize("family", ["Qwen3_5", "Mamba2", "Lfm2", "MiniMax", "Mamba"])
def test_results_in_bfloat16_have_the_types_of_transformers(family):
    model, given = make(family).bfloat16(), inputs()
    generated = generate(model, given)
    hf.accelerate(model)
    again = generate(model, given)
    torch.testing.assert_close(again.logits[0], generated.logits[0], atol=0.1, rtol=0.1)
    found, expected = (states(each.cache) for each in (again, generated))
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in expected.items()}


PACKED = ["Qwen3Next", "KimiLinear", "FalconH1", "NemotronH", "Zamba2", "Lfm2", "MiniMax"]


@pytest.mark.parametrize("family", PACKED)
@pytest.mark.parametrize("argument", ["cu_seq_lens_q", "seq_idx"])
def test_packed_sequences_are_refused(family, argument):
    model = make(family)
    hf.accelerate(model)
    packed = {"cu_seq_lens_q": [0, 4, 9], "seq_idx": [[0, 0, 0, 0, 1, 1, 1, 1, 1]]}[argument]
    with pytest.raises(UnsupportedError, match=f"got {argument}, but cannot keep packed sequences apart"):
        model(torch.full((1, 9), 5), **{argument: torch.tensor(packed, dtype=torch.int32)})


def by_parts(model, switches):
    """The logits of a sequence read in parts, by our kernels where `switches` is True; and the last states."""
    ids, found = inputs()["input_ids"][:1], []
    cache = None
    if model.config.model_type == "minimax":
        cache = transformers.models.minimax.modeling_minimax.MiniMaxCache()
    for part, ours in zip(ids.split((14, 1, 5, 1), dim=1), switches, strict=True):
        (hf.accelerate if ours else hf.restore)(model)
        with torch.no_grad():
            output = model(part, use_cache=True, cache=cache)
        cache = output.cache
        found.append(output.logits[0])
    return torch.cat(found), {name: x.clone() for name, x in states(cache).items()}


@pytest.mark.parametrize("family", ["Qwen3_5", "KimiLinear", "Mamba2", "MiniMax", "Lfm2", "Mamba"])
@pytest.mark.parametrize("switches", [(1, 0, 1, 0), (0, 1, 0, 1), (1, 1, 1, 1)])
def test_a_cache_goes_on_with_and_without(family, switches):
    model = make(family)
    assert_close(by_parts(model, switches), by_parts(model, (0, 0, 0, 0)))


def scaled(x, /, by=2, *, plus=3):
    return abs(x) * by + plus


def test_a_forward_that_calls_other_functions_keeps_its_defaults():
    other = rebound(scaled, {"abs": lambda x: 10 * x})
    assert (scaled(-1), other(-1), other(-1, 3, plus=0)) == (5, -17, -30)


def test_other_models_of_the_family_are_left_alone():
    one, other = make("Qwen3_5"), make("Qwen3_5")
    hf.accelerate(one)
    before = logits(other, inputs())
    hf.restore(one)
    assert torch.equal(before, logits(one, inputs()))


def test_accelerating_twice_is_accelerating_once():
    model = make("Mamba2")
    first = hf.accelerate(model)
    expected = logits(model, inputs())
    assert hf.accelerate(model) == first
    assert torch.equal(logits(model, inputs()), expected)
    hf.restore(model)
    assert not any("forward" in vars(layer) for layer in model.modules())


def test_a_copy_runs_its_own_layers():
    model = make("Mamba2")
    hf.accelerate(model)
    expected, other = logits(model, inputs()), copy.deepcopy(model)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(logits(other, inputs()), expected)


def test_an_unpickled_model_can_be_accelerated_again():
    model = make("Lfm2")
    before = logits(model, inputs())
    hf.accelerate(model)
    accelerated, file = logits(model, inputs()), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert torch.equal(logits(other, inputs()), before)
    hf.accelerate(other)
    assert torch.equal(logits(other, inputs()), accelerated)
    hf.restore(other)
    assert torch.equal(logits(other, inputs()), before)


def test_compiled_layers_keep_their_own_functions():
    model, other = make("Qwen3_5"), make("Qwen3_5")
    hf.accelerate(model)
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    for each in (model, other, model):
        layer = each.model.layers[0].linear_attn
        compiled = torch.compile(lambda x, layer=layer: layer(x), backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), layer(x))


def test_a_model_with_nothing_to_replace_is_refused():
    config = transformers.LlamaConfig(**TEXT)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has no layer to accelerate: no layer calls"):
        hf.accelerate(transformers.LlamaForCausalLM(config))


def test_the_report_says_what_was_replaced():
    report = hf.accelerate(make("Mamba"))
    assert [layer.name for layer in report.layers] == [f"backbone.layers.{i}.mixer" for i in range(3)]
    text = str(report)
    assert text.startswith("MambaForCausalLM: ")
    assert "\n  MambaMixer (backbone.layers.0.mixer and 2 more)\n" in text
    assert "\n    causal_conv1d_fn: replaced by causal_conv\n" in text
    assert "\n    mamba_selective_scan: replaced by selective_scan" in text


def test_a_function_with_other_parameters_is_kept(monkeypatch):
    model = make("Lfm2")
    layer = transformers.models.lfm2.modeling_lfm2
    monkeypatch.setattr(layer, "causal_conv1d_update", lambda hidden_states, stride: None)
    report = hf.accelerate(model)
    assert list(report.layers[0].replaced) == ["causal_conv1d_fn"]
    assert report.layers[0].kept == {
        "causal_conv1d_update": "its parameters are hidden_states, stride, but must be hidden_states, conv_state, "
        "weight, bias, activation"
    }


def test_a_layer_with_a_forward_of_its_own_is_kept():
    model = make("Lfm2")
    layer = model.model.layers[0].conv
    layer.forward = partial(layer.forward)
    first, second = hf.accelerate(model).layers
    assert not first.replaced
    assert set(first.kept.values()) == {"its forward is not that of its class, but of a hook"}
    assert second.replaced
    hf.restore(model)
    assert "forward" in vars(layer)


class Count(ModelHook):
    def __init__(self):
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


def test_layers_below_hooks_stay_accelerated_when_it_is_called_again():
    model = make("Lfm2")
    hf.accelerate(model)
    before = [vars(layer.conv)["forward"] for layer in model.model.layers if hasattr(layer, "conv")]
    hooked = [
        add_hook_to_module(layer.conv, ModelHook()) for layer in model.model.layers if hasattr(layer, "conv")
    ]
    with pytest.raises(
        UnsupportedError, match="has no layer to accelerate: its forward is not that of its class"
    ):
        hf.accelerate(model)
    assert [remove_hook_from_module(layer).forward for layer in hooked] == before


def test_a_hook_on_an_accelerated_layer_is_kept():
    model, hook = make("Lfm2"), Count()
    before = logits(model, inputs())
    hf.accelerate(model)
    layer = add_hook_to_module(model.model.layers[0].conv, hook)
    first, second = hf.accelerate(model).layers
    assert not first.replaced
    assert second.replaced
    hf.restore(model)
    assert torch.equal(logits(model, inputs()), before)
    assert hook.calls == 1
    remove_hook_from_module(layer)
    assert torch.equal(logits(model, inputs()), before)

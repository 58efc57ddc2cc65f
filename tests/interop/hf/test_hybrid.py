"""Hybrids of a gated delta rule and softmax attention become decoders that compute the same."""

import importlib
import inspect
import sys
import types
from functools import cache

import pytest
import torch
import transformers
from agreement import assert_agree

from unrolled.contract import UnsupportedError
from unrolled.generation import generate
from unrolled.interop.hf import from_transformers, import_weights, to_transformers
from unrolled.models import Decoder, load

SIZES = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LINEAR, FULL = "linear_attention", "full_attention"
MIXED = {"layer_types": [LINEAR, FULL, LINEAR]}
ROPE = {"rope_type": "default", "rope_theta": 50.0}
QWEN3_NEXT = SIZES | {"head_dim": 8, "num_experts": 0, "partial_rotary_factor": 0.5}
QWEN3_5 = SIZES | {"head_dim": 8, "partial_rotary_factor": 0.5}
CASES = {
    "qwen3_next": ("Qwen3Next", QWEN3_NEXT | MIXED | {"attention_bias": True}),
    "qwen3_next softmax first": (
        "Qwen3Next",
        QWEN3_NEXT | {"layer_types": [FULL, LINEAR, FULL], "tie_word_embeddings": True}
        | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}},
    ),
    "qwen3_next without experts": (
        "Qwen3Next",
        QWEN3_NEXT | {"layer_types": [LINEAR, LINEAR, FULL], "num_experts": 4, "mlp_only_layers": [0, 1, 2]}
        | {"linear_num_key_heads": 1},
    ),
    "qwen3_next softmax only": ("Qwen3Next", QWEN3_NEXT | {"layer_types": [FULL] * 3, "head_dim": 4}),
    "qwen3_5": ("Qwen3_5", QWEN3_5 | MIXED | {"rms_norm_eps": 0.1, "linear_conv_kernel_dim": 3}),
    "qwen3_5 tied": (
        "Qwen3_5",
        QWEN3_5 | {"layer_types": [FULL, FULL, LINEAR], "tie_word_embeddings": True, "attention_bias": True}
        | {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        SIZES | MIXED | {"attention_bias": True, "rope_parameters": ROPE | {"rope_theta": None}},  # none
    ),
    "olmo_hybrid rotary": (
        "OlmoHybrid",
        SIZES | {"layer_types": [FULL, LINEAR, FULL], "linear_allow_neg_eigval": False}
        | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}  # which it ignores
        | {"tie_word_embeddings": True, "linear_num_key_heads": 4, "num_key_value_heads": 4},
    ),
}  # fmt: skip
FOLDERS = {"Qwen3Next": "qwen3_next", "Qwen3_5": "qwen3_5", "OlmoHybrid": "olmo_hybrid"}
CONFIGS = {"Qwen3_5": "Qwen3_5TextConfig"}


@cache
def in_fp64(family):
    """Their module with fp64 wherever it computes in fp32, so that rounding hides nothing."""
    folder = FOLDERS[family]
    theirs = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    source = inspect.getsource(theirs)
    for single, double in (
        (".float()", ".double()"),
        ("torch.float32", "torch.float64"),
        ("dtype=torch.float)", "dtype=torch.double)"),
    ):
        source = source.replace(single, double)
    twin = types.ModuleType(f"{theirs.__name__}_in_fp64")
    twin.__package__, twin.__file__ = theirs.__package__, theirs.__file__
    sys.modules[twin.__name__] = twin
    exec(compile(source, theirs.__file__, "exec"), twin.__dict__)
    return twin


def make(family, settings, dtype=torch.float64):
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**settings)
    module = transformers if dtype == torch.float32 else in_fp64(family)
    model = getattr(module, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype).eval()


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(params=["qwen3_next", "qwen3_5 tied", "olmo_hybrid"])
def one_of_a_family(request):
    return CASES[request.param]


@torch.no_grad()
def test_logits_are_equal(case):
    theirs = make(*case)
    ours = import_weights(theirs)
    assert isinstance(ours, Decoder)
    assert not ours.training
    tokens = torch.randint(1, 23, (2, 70))
    padding = torch.arange(70) < torch.tensor([[0], [7]])
    expected = theirs(tokens, attention_mask=(~padding).long()).logits
    found = ours(tokens, key_padding_mask=padding)
    assert_agree(found[~padding], expected[~padding], tolerance=1e-10)


@torch.no_grad()
def test_logits_of_the_class_itself_are_equal(case):
    theirs = make(*case, dtype=torch.float32)
    tokens = torch.randint(1, 23, (2, 20))
    assert_agree(import_weights(theirs)(tokens), theirs(tokens).logits, tolerance=1e-5)


def test_what_is_generated_is_equal(case):
    theirs = make(*case, dtype=torch.float32)
    prompt = [3, 1, 4, 1, 5]
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    (found,) = generate(import_weights(theirs), [prompt], temperature=0, max_new_tokens=12)
    assert found.tolist() == expected[0, len(prompt) :].tolist()


def test_gradients_are_equal(one_of_a_family):
    """Of each of their parameters, along a random direction: the copy of a moved parameter is ours, moved."""
    theirs = make(*one_of_a_family).train()
    ours = import_weights(theirs)
    assert ours.training
    tokens = torch.randint(1, 23, (2, 13))
    weights = torch.randn(2, 13, 23, dtype=torch.float64)  # of a loss: theirs would be in fp32
    for logits in (theirs(tokens).logits, ours(tokens)):
        (logits * weights).mean().backward()
    for name, parameter in theirs.named_parameters():
        direction = torch.randn_like(parameter)
        parameter.data += direction
        moved = zip(import_weights(theirs).parameters(), ours.parameters(), strict=True)
        parameter.data -= direction
        found = sum(((to - own).detach() * own.grad).sum() for to, own in moved)
        assert_agree(found, (direction * parameter.grad).sum(), name, tolerance=1e-10)


@torch.no_grad()
def test_states_and_files_carry_all_options(one_of_a_family, tmp_path):
    theirs = make(*one_of_a_family, dtype=torch.float32)
    ours = import_weights(theirs)
    tokens = torch.randint(1, 23, (2, 9))
    expected = ours(tokens)
    ours.save(tmp_path / "ours")
    assert torch.equal(load(tmp_path / "ours").eval()(tokens), expected)
    wrapped = to_transformers(ours)
    wrapped.save_pretrained(tmp_path / "wrapped")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wrapped").eval()
    assert torch.equal(from_transformers(again)(tokens), expected)
    theirs.save_pretrained(tmp_path / "theirs")
    assert torch.equal(import_weights(tmp_path / "theirs").eval()(tokens), expected)
    y, state = ours.prefill(tokens[:, :5], ours.init_state(2))
    for t in range(5, 9):
        y, state = ours.step(tokens[:, t], state)
        torch.testing.assert_close(y, expected[:, t], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("Qwen3Next", {"num_experts": 4}, "layer 0 is a mixture of experts, which has no counterpart here"),
        ("Qwen3Next", {"hidden_act": "gelu"}, "hidden_act is 'gelu', but must be 'silu'"),
        (
            "Qwen3Next",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type is 'linear', but must be 'default'",
        ),
        ("OlmoHybrid", MIXED | {"hidden_act": "relu"}, "hidden_act is 'relu', but must be 'silu'"),
    ],
)
def test_what_has_no_counterpart_is_refused(family, settings, message):
    with pytest.raises(UnsupportedError, match=message):
        import_weights(
            make(family, (SIZES if family == "OlmoHybrid" else QWEN3_NEXT) | settings, torch.float32)
        )


def test_other_classes_and_options_are_refused():
    model = make("Qwen3Next", QWEN3_NEXT, torch.float32)
    with pytest.raises(
        UnsupportedError, match="Qwen3NextModel has no counterpart here; use Qwen3NextForCausalLM"
    ):
        import_weights(model.model)
    with pytest.raises(UnsupportedError, match=r"the options \['eps'\] were given, but must be left out"):
        import_weights(model, eps=1e-3)


def test_models_that_read_images_name_their_language_model(tmp_path):
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    text = QWEN3_5 | MIXED
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config=vision | {"num_position_embeddings": 16}
    )
    whole = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    for source in (whole, tmp_path):
        with pytest.raises(UnsupportedError, match="it reads images too; import its language model"):
            import_weights(source)
    ours = import_weights(transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path)).eval()
    tokens = torch.randint(1, 23, (1, 9))
    with torch.no_grad():
        assert_agree(ours(tokens), whole(input_ids=tokens).logits, tolerance=1e-5)

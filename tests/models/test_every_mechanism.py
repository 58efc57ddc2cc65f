"""Every model with every mechanism or cell that it names: it works in all its forms, or says what to use."""

import pytest
import torch
from small_models import FIELDS, B, arguments, small_model

from models.kit import read
from unrolled import alignment, attention, models, recurrent
from unrolled.contract import UnsupportedError


def named_by(kind):
    """The mechanisms that a model's `attention` names."""
    return alignment.names() if kind.endswith("seq2seq") else attention.names()


PARTS = [
    *((kind, "attention", name) for kind in FIELDS for name in named_by(kind)),
    *(
        ("encoder_decoder", f"{part}_attention", n)
        for part in ("decoder", "cross")
        for n in attention.names()
    ),
    *((kind, "cell", name) for kind in ("recurrent_lm", "ntm", "ntm_numbers") for name in recurrent.names()),
]
PARTS = [part for part in PARTS if part[1] in models.KINDS[part[0]].config_type.__dataclass_fields__]
FIRST_READS = {"perceiver_ar": lambda name: ["softmax", name]}  # the first block reads the inputs
OPTIONS = {
    ("vit", "spatiotemporal"): {
        "attention_options": {"spatiotemporal": {"shape": [1, 2, 2]}},
        "pooling": "mean",
        "max_length": 4,
    },
    ("segmenter", "spatiotemporal"): {"attention_options": {"spatiotemporal": {"shape": [4, 2, 2]}}},
    ("ntm", "linear_attention"): {"hidden_size": 4},
    ("ntm_numbers", "linear_attention"): {"hidden_size": 4},
}


@pytest.mark.parametrize(("kind", "field", "name"), PARTS, ids=lambda x: x)
def test_it_works_in_all_forms_or_says_what_to_use(kind, field, name, tmp_path):
    torch.manual_seed(0)
    value = FIRST_READS.get(kind, str)(name) if field == "attention" else name
    try:
        model = small_model(kind, **{field: value} | OPTIONS.get((kind, name), {})).double().eval()
    except UnsupportedError:
        return
    inputs, targets = arguments(kind)
    y = model(*inputs)
    model.loss(inputs[0], targets).backward()
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)

    model.save(tmp_path)
    assert torch.equal(models.load(tmp_path).eval()(*inputs), y)
    if hasattr(model, "step"):
        check_steps(model, inputs, y)


def check_steps(model, inputs, y):
    """Prefill and steps give what `forward` gives."""
    state = model.init_state(inputs[0]) if len(inputs) == 2 else model.init_state(B)
    tokens = inputs[-1]
    found, _ = read(model, [tokens[:, :2], *tokens[:, 2:].unbind(1)], state)
    torch.testing.assert_close(found, y)

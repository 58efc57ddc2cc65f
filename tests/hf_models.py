"""Small models of ours inside the classes for transformers."""

import torch

from unrolled.interop import hf

VOCAB_SIZE = 17
SMALL = {"vocab_size": VOCAB_SIZE, "d_model": 16, "n_layers": 2, "n_heads": 2}
MECHANISMS = {
    "linear": {"max_length": 64},
    "softmax": {"positions": "rotary", "n_kv_heads": 1},
    "window": {"positions": "rotary", "attention_options": {"window": {"window": 5}}},
    "performer": {"positions": "sinusoidal"},
    "retention": {"positions": "none", "start_token": True, "norm": "post"},
}


def make(name="linear", kind=hf.UnrolledForCausalLM, **fields):
    """Make a model in double precision, with weights large enough for its tokens to differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = hf.UnrolledConfig(**SMALL | {"attention": name} | MECHANISMS.get(name, {}) | fields)
        model = kind(config).double().eval()
        for x in model.parameters():
            x.data += torch.randn_like(x) * 0.7
    return model


def prompts():
    """Two of equal length."""
    return torch.randint(VOCAB_SIZE, (2, 7), generator=torch.Generator().manual_seed(1))

"""The functions of transformers that are replaced, and the kernels that replace them.

These are functions that the modelling files of transformers define for machines without special kernels,
under the same names in all families: the gated delta rule in Qwen3-Next, Qwen3.5 and OLMo-hybrid, and with a
gate for each feature in Kimi-Linear; the scan of Mamba-2 in Mamba-2, Bamba, Falcon-H1, GraniteMoeHybrid,
Nemotron-H and Zamba2; that of the first Mamba in Mamba, Falcon-Mamba, Jamba and Zamba; the convolution in all
of these, and in LFM2 and others; and the averages of RWKV-4.
"""

from inspect import signature

from torch import nn

from unrolled.interop.hf.accelerate import conv, delta, selective, ssd, wkv
from unrolled.interop.hf.accelerate.rebind import Function

# The replacements take the same arguments as the functions that they replace.
REPLACEMENTS: dict[str, tuple[Function, str]] = {
    "causal_conv1d_fn": (conv.causal_conv1d_fn, "causal_conv"),
    "causal_conv1d_update": (conv.causal_conv1d_update, "one product with the last inputs"),
    "torch_chunk_gated_delta_rule": (delta.chunk_delta_rule, "delta_rule"),
    "torch_recurrent_gated_delta_rule": (delta.recurrent_delta_rule, "delta_rule_step"),
    "chunk_kimi_delta_attention": (delta.chunk_delta_rule, "delta_rule"),
    "recurrent_kimi_delta_attention": (delta.recurrent_delta_rule, "delta_rule_step"),
    "mamba2_chunk_scan": (ssd.mamba2_chunk_scan, "linear_attention"),
    "mamba2_selective_state_update": (
        ssd.mamba2_selective_state_update,
        "a step that updates the state in place",
    ),
    "mamba_selective_scan": (selective.mamba_selective_scan, "selective_scan"),
    "mamba_selective_state_update": (
        selective.mamba_selective_state_update,
        "a step that updates the state in place",
    ),
    "rwkv_linear_attention": (wkv.rwkv_linear_attention, "wkv"),
}


def why_kept(name: str, function: Function) -> str | None:
    """Return why a function that a layer calls by this name is kept; None if it can be replaced."""
    # A function that transformers offers to the package `kernels` is a module.
    plain = function.forward if isinstance(function, nn.Module) else function
    ours, theirs = (list(signature(each).parameters) for each in (REPLACEMENTS[name][0], plain))
    if ours != theirs:
        return f"its parameters are {', '.join(theirs)}, but must be {', '.join(ours)}"
    return None

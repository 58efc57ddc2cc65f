"""How near the attention matrices of a trained model are to a low rank, by their singular values."""

from itertools import islice

import torch
from torch import Tensor, nn

from unrolled.attention.base import Masks
from unrolled.contract import Dataset
from unrolled.models.blocks import AttentionBlock

EXAMPLES = 64
"""How many validation examples `mean_mass` averages over by default."""


def spectral_mass(weights: Tensor) -> Tensor:
    """Return the share of the first quarter of the singular values s_1 >= ... >= s_n in their sum.

        (s_1 + ... + s_m) / (s_1 + ... + s_n)        m = n / 4, rounded up

    It is 1 for a rank of at most m, and m / n where all singular values are equal, as for the identity.

    Wang et al. 2020, "Linformer", arXiv 2006.04768, section 3.1 and figure 1: the normalised cumulative
    singular values, there at 128 of 512.

    Args:
        weights: `[...,n,n]` with n >= 1.

    Returns:
        `[...]`, fp64, without a unit.
    """
    values: Tensor = torch.linalg.svdvals(weights.double())
    first = -(-values.shape[-1] // 4)
    mass: Tensor = values[..., :first].sum(-1) / values.sum(-1)
    return mass


def attention_weights(model: nn.Module, layer: int, inputs: Tensor) -> Tensor:
    """Return the weights `[B,H,T,T]` with which the self-attention of a layer reads `inputs [B,T,...]`.

    Args:
        model: a model of blocks, in eval mode.
        layer: number of the block, from 1. If the block runs several times, its last run counts.
        inputs: inputs of the model, without padding.

    Raises:
        ValueError: the model has no such layer.
        UnsupportedError: the attention of this layer computes no weights.
    """
    blocks = [module for module in model.modules() if isinstance(module, AttentionBlock)]
    if not 1 <= layer <= len(blocks):
        raise ValueError(f"layer is {layer}, but must be from 1 to {len(blocks)}, as the model has layers")
    attention, read = blocks[layer - 1].attention, []
    hook = attention.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))
    try:
        with torch.no_grad():
            model(inputs)
            heads = attention.heads_of(attention.project(read[-1]), read[-1])
            return attention.weights_of(heads, Masks())
    finally:
        hook.remove()


def mean_mass(model: nn.Module, dataset: Dataset, layer: int, *, examples: int = EXAMPLES) -> float:
    """Average `spectral_mass` over the heads of a layer and the first examples of the validation split.

    Examples are read one by one without their padding. The layer is that of `attention_weights`.
    """
    device, masses = next(model.parameters()).device, []
    for batch in islice(dataset.eval_batches(1), examples):
        padding = batch.key_padding_mask
        inputs = batch.inputs if padding is None else batch.inputs[:, ~padding[0]]
        masses.append(spectral_mass(attention_weights(model, layer, inputs.to(device))).mean())
    return float(torch.stack(masses).mean())

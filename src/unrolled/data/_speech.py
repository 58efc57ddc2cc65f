"""Batches of utterances, and masks that hide parts of them in training."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unrolled.contract import IGNORED, Batch
from unrolled.ops.masks import padding_mask

WIDEST = {"frames": 12, "bands": 6}


class Utterance(NamedTuple):
    """The features of a sound, [T, n_mels], and the ids of what is said in it, [U]."""

    features: Tensor
    ids: Tensor


def as_batch(utterances: Sequence[Utterance]) -> Batch:
    """Make a batch of utterances, padded at their ends to the longest: inputs by 0, targets by `IGNORED`."""
    pad = torch.nn.utils.rnn.pad_sequence
    inputs = pad([x.features for x in utterances], batch_first=True)
    targets = pad([x.ids for x in utterances], batch_first=True, padding_value=IGNORED)
    return Batch(inputs, targets, padding_mask(torch.tensor([len(x.features) for x in utterances])))


def hide(batch: Batch, rng: np.random.Generator, masks: int) -> Batch:
    """Set `masks` random time bars and `masks` random frequency bars of each utterance to 0, its mean.

    A bar is up to 12 frames or 6 bands wide (Park et al. 2019, "SpecAugment", arXiv 1904.08779, section 2,
    without its time warping and with narrower bars).
    """
    padding = batch.key_padding_mask
    assert padding is not None  # `as_batch` makes it
    hidden = torch.zeros_like(batch.inputs, dtype=torch.bool)
    lengths = (~padding).sum(1).tolist()
    for row, length in zip(hidden, lengths, strict=True):
        for axis, size in (("frames", length), ("bands", batch.inputs.shape[2])):
            for _ in range(masks):
                width = int(rng.integers(WIDEST[axis] + 1))
                start = int(rng.integers(max(size - width, 0) + 1))
                part = row if axis == "frames" else row.T
                part[start : start + width] = True
    return batch._replace(inputs=batch.inputs.masked_fill(hidden, 0))

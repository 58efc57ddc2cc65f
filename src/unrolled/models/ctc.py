r"""Connectionist temporal classification: from frames to symbols, without knowing which frame holds which.

A model gives each of T frames a distribution p_t over V symbols and a blank. A path has one symbol or blank
for each frame. It stands for the sequence y that is left when repeats are merged and then blanks are removed:

    p(y | x) = sum over the paths pi of y of  prod_t p_t(pi_t)          loss = -log p(y | x) / U

where U is the length of y. The sum is computed by a recursion over t and the places in y. Graves et al. 2006,
"Connectionist Temporal Classification", ICML, eq. 2-8; computed by torch.

Cost: O(T U). A path needs a frame for each symbol, and one for the blank between two equal symbols, so T
limits the length of y.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.contract import IGNORED
from unrolled.fields import Size
from unrolled.models.checks import check_targets
from unrolled.models.config import ModelConfig
from unrolled.models.heads import Categorical
from unrolled.models.saving import SavedModel
from unrolled.ops.checks import check_device, check_key_padding_mask, check_tensor, wrong, wrong_shape
from unrolled.ops.dense import Layer
from unrolled.ops.masks import zero_padding
from unrolled.ops.sequence import refuse

SUBSAMPLING = 4


class Subsampling(Layer):
    """Two convolutions over time of 3 frames and stride 2, each followed by a gelu: T frames to T / 4.

    Args:
        n_mels: features of a frame.
        d_model: channels of both.
    """

    def __init__(self, n_mels: int, d_model: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(n, d_model, 3, stride=2, padding=1) for n in (n_mels, d_model))

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """`[B,T,n_mels]` to `[B,ceil(T/4),d_model]`; `padding [B,T]` is True at padding, which becomes 0."""
        dtype = cast(Tensor, self.convs[0].weight).dtype
        for conv in self.convs:
            x = F.gelu(conv(zero_padding(padding, x)[0].mT)).mT
            padding = None if padding is None else padding[:, ::2]
        return zero_padding(padding, x)[0].to(dtype)  # autocast must not narrow the residual stream


class CTCModel(SavedModel):
    """Subsampled frames, an encoder, and for each remaining frame a distribution over symbols and blank.

    A model derives from this class and defines `encode`. Its config has the fields vocab_size, n_mels and
    d_model; the id `vocab_size` is the blank.
    """

    vocab_size: int
    n_mels: int

    def __init__(
        self, config: ModelConfig, *, vocab_size: Size, n_mels: Size, d_model: Size, hidden_size: Size
    ) -> None:
        super().__init__(config)
        self.vocab_size, self.n_mels = vocab_size, n_mels
        self.subsampling = Subsampling(n_mels, d_model)
        self.head = Categorical(hidden_size, vocab_size + 1, bias=True)

    def encode(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Read frames `[B,T,d_model]`, with `padding [B,T]` if any; return the input of the output layer."""
        raise NotImplementedError

    def forward(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Log-probabilities of the symbols and, last, of the blank, in at least fp32.

        Args:
            x: features of frames, `[B,T,n_mels]`.
            key_padding_mask: `[B,T]` bool, True at padding, which is at the end of each row.

        Returns:
            `[B,ceil(T/4),vocab_size+1]`.

        Raises:
            ValueError: an argument of another shape or type, or padding before a frame.
        """
        refuse("a model of speech")
        weight = cast(Tensor, self.subsampling.convs[0].weight)
        check_tensor("x", x)
        check_device("x", x, weight)
        if x.dim() != 3 or x.shape[1] == 0 or x.shape[2] != self.n_mels or not x.is_floating_point():
            raise wrong("x", x, f"floating point [B, T, {self.n_mels}] with T of at least 1")
        padding = None if key_padding_mask is None else _padding(x, key_padding_mask)
        left = None if padding is None else subsampled(padding)
        return self.head.log_probs(self.encode(self.subsampling(x.to(weight.dtype), padding), left))

    def loss(self, inputs: Tensor, targets: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Mean -log p(y | x) in nats per symbol of y, in at least fp32; if no row has symbols, the sum.

        Args:
            inputs: as `x` of `forward`.
            targets: `[B,U]` long, the symbols of each row, then -100.
            key_padding_mask: as for `forward`.

        Raises:
            ValueError: `targets` has another shape, or a row has more symbols than its frames can stand for.
        """
        check_tensor("targets", targets)
        if targets.dim() != 2:
            raise wrong_shape("targets", targets, "[B, U]")
        log_probs = self(inputs, key_padding_mask=key_padding_mask)
        frames = self.frames(inputs, key_padding_mask)
        check_targets(targets, (len(inputs), targets.shape[1]), self.vocab_size)
        return ctc_loss(log_probs, targets, frames)

    def frames(self, x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Number of frames of each row of `x [B,T,n_mels]` that are left after subsampling: `[B]`."""
        return (~subsampled(_padding(x, key_padding_mask))).sum(1)


def ctc_loss(log_probs: Tensor, targets: Tensor, frames: Tensor) -> Tensor:
    """Mean -log p(y | x) in nats per symbol of y; if no row has symbols, the sum over the rows.

    Args:
        log_probs: `[B,T,V+1]`, the blank last.
        targets: `[B,U]` long, the symbols of each row, then -100.
        frames: `[B]` long, the frames of each row.

    Raises:
        ValueError: a target stands after one that is ignored, or a row has more symbols than its frames can
            stand for, so that its probability is 0.
    """
    asked = targets != IGNORED
    counts = asked.sum(1)
    if bool((asked[:, 1:] & ~asked[:, :-1]).any()):
        raise ValueError(f"targets has ids after {IGNORED} in a row, but must have {IGNORED} at the end only")
    repeats = ((targets[:, 1:] == targets[:, :-1]) & asked[:, 1:]).sum(1)
    if bool((counts + repeats > frames).any()):
        row = int((counts + repeats > frames).nonzero()[0])
        raise ValueError(
            f"row {row} has {int(frames[row])} frames after subsampling, but must have at least "
            f"{int(counts[row] + repeats[row])}: one for each target and between equal ones"
        )
    if not len(targets):  # torch refuses a batch without rows
        return log_probs.sum()
    total = F.ctc_loss(
        log_probs.transpose(0, 1),
        targets.masked_fill(~asked, 0),
        frames,
        counts,
        blank=log_probs.shape[2] - 1,
        reduction="sum",
    )
    return total / counts.sum().clamp(min=1)


def subsampled(padding: Tensor) -> Tensor:
    """The padding of the frames that are left after subsampling: `[B,T]` -> `[B,ceil(T/4)]`."""
    return padding[:, ::SUBSAMPLING]


def _padding(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    if key_padding_mask is None:
        return torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    check_key_padding_mask(key_padding_mask, *x.shape[:2])
    check_device("key_padding_mask", key_padding_mask, x, "x is")
    if bool((key_padding_mask[:, :-1] & ~key_padding_mask[:, 1:]).any()):
        raise ValueError("key_padding_mask has padding before a frame, but must have it at the end of rows")
    return key_padding_mask

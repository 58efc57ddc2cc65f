r"""Reversible blocks: the input of each is computed from its output, and need not be kept for the backward.

Two residual streams start as the same x, and their mean leaves the last block:

    y1 = x1 + attention(norm(x2))        y2 = x2 + ff(norm(y1))
    x2 = y2 - ff(norm(y1))               x1 = y1 - attention(norm(x2))

Kitaev, Kaiser and Levskaya 2020, "Reformer", arXiv 2001.04451, section 3, after
Gomez et al. 2017, "The Reversible Residual Network", arXiv 1707.04585.

The backward goes from the last block to the first, restores a block's input, and computes the block once
more for its gradients. Dropout and hashing repeat what they did (see `ops/replay.py`), which costs a byte or
two for each bucket. Rounding makes the restored streams drift from what they were; they are kept in fp32 at
least. A step of generation carries both streams.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unrolled.models.blocks import Block
from unrolled.models.config import TransformerConfig
from unrolled.models.stack import Stack
from unrolled.ops.precision import accumulation_dtype
from unrolled.ops.replay import Replay

Masks = dict[str, Tensor | None]


class ReversibleBlock(Block):
    """A block of two streams side by side, `[..., 2 d_model]`."""

    def attended(self, x2: Tensor, masks: Masks) -> Tensor:
        """What the attention adds to the first stream."""
        return self._dropped(self._attend(self._normed(self.attention_norm, x2), masks))

    def fed(self, y1: Tensor) -> Tensor:
        """What the feed-forward layer adds to the second stream."""
        return self._dropped(self.ff(self._normed(self.ff_norm, y1)))

    def _before(self, x: Tensor) -> Tensor:
        return self._normed(self.attention_norm, x.chunk(2, dim=-1)[1])

    def _after(self, x: Tensor, attended: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        y1 = x1 + self._dropped(attended)
        return torch.cat([y1, x2 + self.fed(y1)], dim=-1)

    def _normed(self, norm: Any, x: Tensor) -> Tensor:
        return cast(Tensor, norm(x.to(norm.weight.dtype)))


class ReversibleStack(Stack):
    """A stack of reversible blocks. Training keeps their last output only, whatever their number.

    `recompute` changes nothing, since they always are. Compiled by `torch.compile`, the stack gives the same,
    but keeps activations like any other.
    """

    block = ReversibleBlock

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        global_mask: Tensor | None = None,
        recompute: bool = False,
        start: int = 0,
    ) -> Tensor:
        """[B, T, d_model] -> [B, T, d_model]; see `Stack.forward`."""
        masks = self._masks(key_padding_mask, cu_seqlens, global_mask)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return super().forward(
                x,
                key_padding_mask=key_padding_mask,
                cu_seqlens=cu_seqlens,
                global_mask=global_mask,
                start=start,
            )
        blocks = self.blocks[start:]
        parameters = [p for p in blocks.parameters() if p.requires_grad]
        run: Callable[..., Tensor] = _Run.apply
        return self._leave(run(self._enter(x, key_padding_mask), list(blocks), masks, *parameters))

    def _enter(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        x = super()._enter(x, key_padding_mask)
        return torch.cat([x, x], dim=-1).to(accumulation_dtype(x.dtype))

    def _leave(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        weight = cast(Tensor, self._blocks()[0].attention_norm.weight)
        return super()._leave(((x1 + x2) / 2).to(weight.dtype))


def make_stack(config: TransformerConfig, *, causal: bool, final_norm: bool = True) -> Stack:
    """The stack that the config asks for, reversible or not."""
    kind = ReversibleStack if config.reversible else Stack
    return kind(config, causal=causal, final_norm=final_norm)


class _Run(torch.autograd.Function):
    """All blocks in a row. Their parameters are arguments, so that autograd hands on their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        blocks: Sequence[ReversibleBlock],
        masks: Masks,
        *parameters: nn.Parameter,
    ) -> Tensor:
        ctx.blocks, ctx.masks, ctx.parameters, ctx.replays = blocks, masks, parameters, []
        y1, y2 = x.chunk(2, dim=-1)
        for block in blocks:
            attending, feeding = Replay(x.device), Replay(x.device)
            y1 = y1 + attending.first(block.attended, y2, masks)
            y2 = y2 + feeding.first(block.fed, y1)
            ctx.replays.append((attending, feeding))
        y = torch.cat([y1, y2], dim=-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gradients: dict[nn.Parameter, Tensor] = {}
        (y,) = ctx.saved_tensors
        (y1, y2), (dy1, dy2) = y.chunk(2, dim=-1), dy.chunk(2, dim=-1)

        def back(replay: Replay, function: Callable[..., Tensor], dy: Tensor, x: Tensor, *rest: Any) -> Any:
            """Run it again at x: its value, and the gradient of x, while those of parameters add up."""
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                z = replay.again(function, x, *rest)
            inputs = [x, *ctx.parameters]
            dx, *others = torch.autograd.grad(z, inputs, dy.to(z.dtype), allow_unused=True)
            for parameter, gradient in zip(ctx.parameters, others, strict=True):
                if gradient is not None:
                    found = gradients.get(parameter)
                    gradients[parameter] = gradient if found is None else found + gradient
            return z.detach(), dx

        for block, (attending, feeding) in zip(reversed(ctx.blocks), reversed(ctx.replays), strict=True):
            fed, dx = back(feeding, block.fed, dy2, y1)
            y2, dy1 = y2 - fed, dy1 + dx
            attended, dx = back(attending, block.attended, dy1, y2, ctx.masks)
            y1, dy2 = y1 - attended, dy2 + dx
        return torch.cat([dy1, dy2], dim=-1), None, None, *map(gradients.get, ctx.parameters)

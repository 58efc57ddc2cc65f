r"""Reversible blocks: the backward pass computes a block's input from its output, so no input is stored.

Two residual streams start as the same x; the output is their mean after the last block:

    y1 = x1 + attention(norm(x2))        y2 = x2 + ff(norm(y1))
    x2 = y2 - ff(norm(y1))               x1 = y1 - attention(norm(x2))

Kitaev, Kaiser and Levskaya 2020, "Reformer", arXiv 2001.04451, section 3, after
Gomez et al. 2017, "The Reversible Residual Network", arXiv 1707.04585.

The backward pass goes from the last block to the first, restores the input of each block, and recomputes the
block for its gradients, with the parameters and in the mode of the forward pass. Parameters changed in place
in between are an error. Dropout masks and hash
buckets are replayed (see `ops/replay.py`), which costs a byte or two for each bucket. Rounding makes the
restored streams drift from the original ones, so they are kept in at least fp32. A step of generation carries
both streams.
"""

from collections.abc import Callable, Sequence
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unrolled.contract import UnsupportedError
from unrolled.models.blocks import Block, Masks
from unrolled.models.config import TransformerConfig
from unrolled.models.stack import Stack
from unrolled.ops.observing import has_own_call, transforming
from unrolled.ops.precision import accumulation_dtype
from unrolled.ops.replay import Replay, as_now


class ReversibleBlock(Block):
    """A block of two concatenated streams, `[..., 2 d_model]`."""

    def attended(self, x2: Tensor, masks: Masks) -> Tensor:
        """What the attention adds to the first stream."""
        return self._dropped(self.attention(self._normed(self.attention_norm, x2), **masks))

    def fed(self, y1: Tensor) -> Tensor:
        """What the feed-forward layer adds to the second stream."""
        return self._dropped(self.ff(self._normed(self.ff_norm, y1)))

    def _read(self, x: Tensor) -> Tensor:
        return self._normed(self.attention_norm, x.chunk(2, dim=-1)[1])

    def _finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        y1 = x1 + self._dropped(attended)
        return torch.cat([y1, x2 + self.fed(y1)], dim=-1)

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        return cast(Tensor, norm(x.to(cast(Tensor, norm.weight).dtype)))


class ReversibleStack(Stack):
    """A stack of reversible blocks. Training stores only the output of the last one.

    The blocks are recomputed whatever `recompute` says, except under `torch.compile` and the transforms of
    `torch.func`, where activations are stored as in an ordinary stack. Otherwise, training calls the parts of
    a block and not the block itself, so hooks and `compile` belong to `block.attention` and `block.ff`.
    """

    block = ReversibleBlock

    def forward(
        self, x: Tensor, *, recompute: bool = False, start: int = 0, **masks: Unpack[Masks]
    ) -> Tensor:
        """[B, T, d_model] -> [B, T, d_model]; see `Stack.forward`."""
        if torch.compiler.is_compiling() or transforming() or not torch.is_grad_enabled():
            return super().forward(x, start=start, **masks)
        blocks, of_blocks = self.blocks[start:], self._masks(masks)[start:]
        if any(has_own_call(block) or block._compiled_call_impl is not None for block in blocks):
            raise UnsupportedError(
                "training calls the parts of a reversible block, not the block: hooks and compile() must be "
                "on block.attention or block.ff"
            )
        parameters = [p for p in blocks.parameters() if p.requires_grad]
        run: Callable[..., Tensor] = _Run.apply
        x = self._enter(x, masks.get("key_padding_mask"))
        return self._leave(run(x, blocks, of_blocks, *parameters))

    def _enter(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        x = super()._enter(x, key_padding_mask)
        return torch.cat([x, x], dim=-1).to(accumulation_dtype(x.dtype))

    def _leave(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        weight = cast(Tensor, self.layers[0].attention_norm.weight)
        return super()._leave(((x1 + x2) / 2).to(weight.dtype))


def make_stack(config: TransformerConfig, *, causal: bool, final_norm: bool = True) -> Stack:
    """Make the stack of the config, reversible or not."""
    kind = ReversibleStack if config.reversible else Stack
    return kind(config, causal=causal, final_norm=final_norm)


class _Run(torch.autograd.Function):
    """All blocks in sequence; their parameters are arguments, so that autograd takes their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: nn.ModuleList, masks: Sequence[Masks], *parameters: Tensor
    ) -> Tensor:
        blocks = cast("list[ReversibleBlock]", list(layers))
        ctx.blocks, ctx.masks, ctx.parameters, ctx.replays = blocks, masks, parameters, []
        ctx.as_in_forward = as_now(layers)
        y1, y2 = x.chunk(2, dim=-1)
        for block, own in zip(blocks, masks, strict=True):
            attending, feeding = Replay(x.device), Replay(x.device)
            y1 = y1 + attending.first(block.attended, y2, own)
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

        def back(
            replay: Replay, function: Callable[..., Tensor], dz: Tensor, x: Tensor, *rest: object
        ) -> tuple[Tensor, Tensor]:
            """Recompute z = function(x): z and the gradient of x; parameter gradients add up."""
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                z = replay.again(function, x, *rest)
            inputs = [x, *ctx.parameters]
            dx, *others = torch.autograd.grad(z, inputs, dz.to(z.dtype), allow_unused=True)
            for parameter, gradient in zip(ctx.parameters, others, strict=True):
                if gradient is not None:
                    found = gradients.get(parameter)
                    gradients[parameter] = gradient if found is None else found + gradient
            return z.detach(), dx

        calls = list(zip(ctx.blocks, ctx.masks, ctx.replays, strict=True))
        with ctx.as_in_forward():
            for block, own, (attending, feeding) in reversed(calls):
                fed, d_y1 = back(feeding, block.fed, dy2, y1)
                y2, dy1 = y2 - fed, dy1 + d_y1
                attended, d_y2 = back(attending, block.attended, dy1, y2, own)
                y1, dy2 = y1 - attended, dy2 + d_y2
        return torch.cat([dy1, dy2], dim=-1), None, None, *map(gradients.get, ctx.parameters)

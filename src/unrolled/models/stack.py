"""The stack of blocks that the models are made of."""

from functools import partial
from typing import Unpack, cast

from torch import Tensor, nn

from unrolled.contract import UnsupportedError
from unrolled.models.blocks import AttentionBlock, Block, Masks, apply, make_norm, tie_layers
from unrolled.models.channel_mix import MixingBlock
from unrolled.models.config import TransformerConfig
from unrolled.ops.dense import Layer
from unrolled.ops.masks import zero_padding
from unrolled.ops.state import Parts

States = tuple[Parts, ...]
"""One state per block."""


class Stack(Layer):
    """`n_layers` blocks, and a norm of the residual stream unless the last is post-norm and ends in one.

    With a `d_ff` of 0, the blocks have no feed-forward layer. Without `final_norm`, the stream is returned as
    it is, so that more blocks can follow.
    """

    block: type[AttentionBlock] = Block

    def __init__(self, config: TransformerConfig, *, causal: bool, final_norm: bool = True) -> None:
        super().__init__()
        kind = self.block
        if kind is Block and config.d_ff == 0:
            kind = AttentionBlock
        elif kind is Block and config.activation == "channel_mix":
            kind = MixingBlock
        self.blocks = nn.ModuleList(kind(config, i, causal=causal) for i in range(config.n_layers))
        tie_layers(block.attention for block in self.layers)
        self.norm = make_norm(config) if config.norms[-1] != "post" and final_norm else nn.Identity()

    def forward(
        self, x: Tensor, *, recompute: bool = False, start: int = 0, **masks: Unpack[Masks]
    ) -> Tensor:
        """[B, T, d_model] -> [B, T, d_model], through the blocks from number `start` on.

        Args:
            x: the residual stream.
            recompute: keep the input of each block only, and recompute the rest in the backward pass.
            start: number of the first block.
            masks: `key_padding_mask [B, T]` bool, True at padding; `cu_seqlens`, offsets of packed sequences;
                `global_mask [B, T]` bool, True at tokens that attend to all others and that all others attend
                to, for those layers whose attention takes it.

        Raises:
            ValueError: a mask of another shape or type.
            UnsupportedError: no layer takes `global_mask`.
        """
        of_blocks = self._masks(masks)[start:]
        x = self._enter(x, masks.get("key_padding_mask"))
        for block, own in zip(self.layers[start:], of_blocks, strict=True):
            x = apply(partial(block, **own), x, layer=block, recompute=recompute)
        return self._leave(x)

    def _masks(self, masks: Masks) -> list[Masks]:
        """The masks of each block: `global_mask` only where the attention takes it."""
        common, global_mask = masks.copy(), masks.get("global_mask")
        common.pop("global_mask", None)
        if global_mask is None:
            return [common] * len(self.blocks)
        takes = [block.attention.supports.global_mask for block in self.layers]
        if not any(takes):
            raise UnsupportedError(
                "no layer of this model takes global_mask; use bidirectional longformer attention"
            )
        return [{**common, "global_mask": global_mask} if each else common for each in takes]

    def init_state(self, batch_size: int) -> States:
        """One state per block."""
        return tuple(block.init_state(batch_size) for block in self.layers)

    def prefill(
        self,
        x: Tensor,
        states: States,
        *,
        key_padding_mask: Tensor | None = None,
        recompute: bool = False,
        start: int = 0,
    ) -> tuple[Tensor, States]:
        """[B, T, d_model] -> [B, T, d_model] and the new states, through the blocks from `start` on."""
        x, after = self._enter(x, key_padding_mask), []
        for block, state in zip(self.layers[start:], states, strict=True):
            prefill = partial(block.prefill, key_padding_mask=key_padding_mask)
            x, state = apply(prefill, x, state, layer=block, recompute=recompute)
            after.append(state)
        return self._leave(x), tuple(after)

    def step(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        """[B, d_model] -> [B, d_model] and the new states."""
        x, blocks, after = self._enter(x), self.layers, []
        if len(states) != len(blocks):
            raise ValueError(f"states has {len(states)} entries, but must have {len(blocks)}, one per block")
        for block, state in zip(blocks, states, strict=True):
            x, state = block.step(x, state)
            after.append(state)
        return self._leave(x), tuple(after)

    def _enter(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Zero the residual stream at padding, which norms and feed-forward layers read too."""
        return zero_padding(key_padding_mask, x)[0]

    def _leave(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.norm(x))

    @property
    def layers(self) -> list[AttentionBlock]:
        """The blocks."""
        return cast("list[AttentionBlock]", list(self.blocks))

    @property
    def full_layers(self) -> list[Block]:
        """The blocks that have a feed-forward layer."""
        return [block for block in self.layers if isinstance(block, Block)]

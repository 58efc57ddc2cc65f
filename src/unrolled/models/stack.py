"""The stack of blocks that the models are made of."""

from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unrolled.contract import UnsupportedError
from unrolled.models import fused
from unrolled.models.blocks import Block, make_norm, tie_layers
from unrolled.models.config import TransformerConfig
from unrolled.ops.checks import check_key_padding_mask
from unrolled.ops.masks import without_padding


class Stack(nn.Module):
    """`n_layers` blocks, and after pre-norm ones a norm of the residual stream; post-norm ones end in one.

    Without `final_norm` the stream is handed on as it is, for more of it to come.
    """

    block = Block

    def __init__(self, config: TransformerConfig, *, causal: bool, final_norm: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block(config, i, causal=causal) for i in range(config.n_layers))
        tie_layers(block.attention for block in self._blocks())
        self.norm = make_norm(config) if config.norm == "pre" and final_norm else nn.Identity()

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
        """[B, T, d_model] -> [B, T, d_model], by the blocks from number `start` on.

        Args:
            x: the residual stream.
            key_padding_mask: [B, T] bool, True at padding.
            cu_seqlens: offsets of packed sequences.
            global_mask: [B, T] bool, True at tokens that read all others and are read by them, in those
                layers whose attention takes it.
            recompute: keep each block's input only, for the backward.
            start: number of the first block.

        Raises:
            UnsupportedError: no layer takes `global_mask`.
        """
        masks = self._masks(key_padding_mask, cu_seqlens, global_mask)
        x = self._enter(x, key_padding_mask)
        for block in self._blocks()[start:]:
            run = partial(block, **masks)
            x = checkpoint(run, x, use_reentrant=False) if recompute else run(x)
        return self._leave(x)

    def _masks(
        self, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None, global_mask: Tensor | None
    ) -> dict[str, Tensor | None]:
        masks = {"key_padding_mask": key_padding_mask, "cu_seqlens": cu_seqlens}
        if global_mask is None:
            return masks
        if not any(block.attention.supports.global_mask for block in self._blocks()):
            raise UnsupportedError(
                "no layer of this model takes global_mask; use longformer attention, bidirectional"
            )
        return masks | {"global_mask": global_mask}

    def init_state(self, batch_size: int) -> tuple[Any, ...]:
        """One state per block."""
        return tuple(block.attention.init_state(batch_size) for block in self._blocks())

    def prefill(
        self, x: Tensor, states: tuple[Any, ...], *, key_padding_mask: Tensor | None = None, start: int = 0
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """[B, T, d_model] -> [B, T, d_model], by the blocks from number `start` on, from states to states."""
        x, after = self._enter(x, key_padding_mask), []
        for block, state in zip(self._blocks()[start:], states, strict=True):
            x, state = block.prefill(x, state, key_padding_mask=key_padding_mask)
            after.append(state)
        return self._leave(x), tuple(after)

    def step(self, x: Tensor, states: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
        """[B, d_model] -> [B, d_model], from states to states."""
        x, blocks = self._enter(x), self._blocks()
        if len(states) != len(blocks):
            raise ValueError(f"found {len(states)} states, wanted {len(blocks)}, one per block")
        after: list[Any] = []
        while (i := len(after)) < len(blocks):
            x, several = fused.step(blocks[i:], x, states[i:])
            if several:
                after += several
            else:
                x, state = blocks[i].step(x, states[i])
                after.append(state)
        return self._leave(x), tuple(after)

    def _enter(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Begin the residual stream, with zeros at padding: norms and feed-forward layers read that too."""
        if key_padding_mask is None:
            return x
        check_key_padding_mask(key_padding_mask, *x.shape[:2])
        return without_padding(x, key_padding_mask)

    def _leave(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.norm(x))

    def _blocks(self) -> list[Block]:
        return cast("list[Block]", list(self.blocks))

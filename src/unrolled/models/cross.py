"""The block of a decoder that reads a second sequence, whole or token by token."""

from collections.abc import Callable
from functools import partial
from typing import cast

from torch import Tensor, nn

from unrolled import attention
from unrolled.contract import UnsupportedError
from unrolled.models.blocks import Attention, ResidualBlock, make_attention, make_feed_forward, make_norm
from unrolled.models.config import TransformerConfig
from unrolled.ops.precision import without_autocast
from unrolled.ops.state import Parts


class DecoderBlock(ResidualBlock):
    """Causal self-attention, attention to a memory, and a feed-forward layer.

    `config` describes the block, and `cross` its attention to the memory.
    """

    def __init__(self, config: TransformerConfig, cross: TransformerConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.attention_norm = make_norm(config)
        self.attention = make_attention(config, layer, causal=True)
        self.cross_norm = make_norm(config)
        self.cross = make_cross_attention(cross, layer)
        self.ff_norm = make_norm(config)
        self.ff = make_feed_forward(config)

    def forward(self, x: Tensor, memory: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Read `x [B,T,d_model]` and the valid tokens of `memory [B,S,d_model]`: `[B,T,d_model]`."""
        x = self._add(x, self.attention_norm, self.attention)
        read = partial(self.cross, key=memory, key_padding_mask=key_padding_mask)
        return self._finish(self._add(x, self.cross_norm, read))

    def prefill(self, x: Tensor, memory: Parts, state: Parts) -> tuple[Tensor, Parts]:
        """[B, T, d_model] -> [B, T, d_model], from a state to a state; `memory` comes from `read`."""
        y, state = self.attention.prefill(self._before(x, self.attention_norm), state)
        return self._recall(self._after(x, y, self.attention_norm), memory), state

    def step(self, x: Tensor, memory: Parts, state: Parts) -> tuple[Tensor, Parts]:
        """[B, d_model] -> [B, d_model], from a state to a state."""
        y, state = self.attention.step(self._before(x, self.attention_norm), state)
        return self._recall(self._after(x, y, self.attention_norm).unsqueeze(1), memory).squeeze(1), state

    def read(self, memory: Tensor, key_padding_mask: Tensor | None) -> Parts:
        """Project `memory [B,S,d_model]` once for `prefill` and `step`; autocast does not change it."""
        with without_autocast(memory.device):
            return cast(Parts, self.cross.read(memory, key_padding_mask=key_padding_mask))

    def weights(self, x: Tensor, memory: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Weight of each place of the memory at each position, `[B,H,T,S]`."""
        x = self._add(x, self.attention_norm, self.attention)
        query = self._before(x, self.cross_norm)
        return self.cross.weights(query, memory, key_padding_mask=key_padding_mask)

    def _recall(self, x: Tensor, memory: Parts) -> Tensor:
        """Attend to a memory that `read` has projected, in the same dtype, then the feed-forward layer."""

        def recall(query: Tensor) -> Tensor:
            with without_autocast(query.device):
                return self.cross.recall(query, memory)

        return self._finish(self._add(x, self.cross_norm, recall))

    def _finish(self, x: Tensor) -> Tensor:
        return self._add(x, self.ff_norm, self.ff)

    def _add(self, x: Tensor, norm: nn.Module, f: Callable[[Tensor], Tensor]) -> Tensor:
        return self._after(x, f(self._before(x, norm)), norm)


def make_cross_attention(config: TransformerConfig, layer: int) -> Attention:
    """Make the module by which one layer of a decoder reads another sequence.

    Raises:
        UnsupportedError: the mechanism cannot read another sequence one query at a time.
        ValueError: as `make_attention`.
    """

    def able(name: str) -> bool:
        supports = attention.load(name).supports
        return supports.cross and supports.single_queries

    if not able(name := config.layer_attention[layer]):
        others = [n for n in attention.names() if able(n)]
        raise UnsupportedError(f"cross_attention cannot be {name!r}; use one of {others} instead")
    return make_attention(config, layer, causal=False)

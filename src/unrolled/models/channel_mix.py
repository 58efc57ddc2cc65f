"""Blocks whose feed-forward layer also reads the token before, as in RWKV."""

from typing import NamedTuple, Unpack

from torch import Tensor, nn

from unrolled.models.blocks import AttentionBlock, Masks, make_norm
from unrolled.models.config import TransformerConfig
from unrolled.ops.checks import check_state_tensor, wrong
from unrolled.ops.dense import Layer, Linear
from unrolled.ops.masks import zero_padding
from unrolled.ops.precision import accumulation_dtype
from unrolled.ops.state import Parts
from unrolled.ops.token_shift import initial_mixtures, mix_with_token_before


class ChannelMix(Layer):
    r"""The feed-forward layer of RWKV-4, which has no biases.

        y_t = sigmoid(W_r x_t^r) * W_2 relu(W_1 x_t^k)^2        x_t^z = x_t + mu_z * (x_{t-1} - x_t)

    Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", arXiv 2305.13048, section 3.1; mu is
    1 - mu there.
    """

    not_decayed = ("mix",)

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = Linear(d_model, d_ff, bias=False)
        self.down = Linear(d_ff, d_model, bias=False)
        self.gate = Linear(d_model, d_model, bias=False)
        self.mix = nn.Parameter(initial_mixtures(d_model, [1.0, 1.0]))  # of k and r

    def forward(
        self,
        x: Tensor,
        last: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """[B, T, d_model] or one token [B, d_model]; see `mix_with_token_before`."""
        mixed, last = mix_with_token_before(
            x, self.mix, last, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens
        )
        k, r = mixed
        return self.gate(r).sigmoid() * self.down(self.up(k).relu().square()), last


class MixingState(NamedTuple):
    """The state of the attention, and the last input of the feed-forward layer, `[B,1,d_model]`."""

    attention: Parts
    previous: Tensor


class MixingBlock(AttentionBlock):
    """Attention, then `ChannelMix`, each added to the residual stream."""

    def __init__(self, config: TransformerConfig, layer: int, *, causal: bool) -> None:
        super().__init__(config, layer, causal=causal)
        if not causal:
            raise wrong("activation", "'channel_mix'", "another one in a bidirectional model")
        self.ff_norm = make_norm(config)
        self.ff = ChannelMix(config.d_model, config.ff_width)

    def forward(self, x: Tensor, **masks: Unpack[Masks]) -> Tensor:
        """[B, T, d_model] -> [B, T, d_model]; the masks are those of `Stack.forward`."""
        x = super().forward(x, **masks)
        x, _ = self._mix(x, None, masks.get("key_padding_mask"), masks.get("cu_seqlens"))
        return x

    def init_state(self, batch_size: int) -> Parts:
        """Make the state of `batch_size` sequences before their first token."""
        of_attention = super().init_state(batch_size)
        mix = self.ff.mix
        last = mix.new_zeros(batch_size, 1, mix.shape[1], dtype=accumulation_dtype(mix.dtype))
        return MixingState(of_attention, last)

    def prefill(
        self, x: Tensor, state: Parts, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Parts]:
        """[B, T, d_model] -> [B, T, d_model], from a state to a state."""
        of_attention, last = self._parts(state, x)
        x, of_attention = super().prefill(x, of_attention, key_padding_mask=key_padding_mask)
        x, last = self._mix(x, last, key_padding_mask)
        return x, MixingState(of_attention, last)

    def step(self, x: Tensor, state: Parts) -> tuple[Tensor, Parts]:
        """[B, d_model] -> [B, d_model], from a state to a state."""
        of_attention, last = self._parts(state, x)
        x, of_attention = super().step(x, of_attention)
        x, last = self._mix(x, last)
        return x, MixingState(of_attention, last)

    def _mix(
        self,
        x: Tensor,
        last: Tensor | None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        (read,) = zero_padding(key_padding_mask, self._before(x, self.ff_norm))
        y, last = self.ff(read, last, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens)
        return self._after(x, y, self.ff_norm), last

    def _parts(self, state: Parts, x: Tensor) -> MixingState:
        """Check a state; the attention checks its own part."""
        if not isinstance(state, MixingState):
            raise ValueError(
                f"state is a {type(state).__name__}, but must be a MixingState, from init_state or prefill "
                "of this model"
            )
        mix = self.ff.mix
        sizes, dtype = (x.shape[0], 1, mix.shape[1]), accumulation_dtype(mix.dtype)
        check_state_tensor("state.previous", state.previous, sizes, dtype, x)
        return state

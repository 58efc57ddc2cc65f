"""Attention over a sequence that several processes share, for mechanisms that define `summarise`."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from unrolled.attention._heads import Heads, Masks
from unrolled.contract import UnsupportedError
from unrolled.ops import sequence

if TYPE_CHECKING:
    from unrolled.attention.base import MultiHeadAttention


def check_slice(mechanism: "MultiHeadAttention[Any, Any]", x: Tensor, masks: Masks, cross: bool) -> None:
    """Check that a mechanism can attend from the slice `x` to slices of other processes, if there are any.

    Raises:
        UnsupportedError: the mechanism cannot, or not with these masks, or `x` is a single token.
        ValueError: the slices of the processes differ in shape.
    """
    if sequence.current() is None:
        return
    if not (mechanism.supports.sequence and mechanism.causal):
        sequence.refuse(f"{'' if mechanism.causal else 'bidirectional '}{mechanism.name} attention")
    if cross or masks.attn_mask is not None:
        sequence.refuse("attention to another sequence" if cross else "attention with an attn_mask")
    if masks.cu_seqlens is not None:
        raise UnsupportedError("packed sequences cannot be cut into slices; use key_padding_mask instead")
    if x.dim() == 2:
        raise UnsupportedError("step reads one token, not slices; call it outside of sequence_parallel")
    sequence.check_slices(x, masks.key_padding_mask)


def attend_over(
    mechanism: "MultiHeadAttention[Any, Any]",
    ranks: sequence.Ranks,
    heads: Heads[Any],
    state: Any,
    key_padding_mask: Tensor | None,
    *,
    to_end: bool,
) -> tuple[Tensor, Any]:
    """Exchange the summaries of the slices, and continue from the state before this rank's slice.

    Arguments and results are those of `MultiHeadAttention.attend_over`.
    """
    summary, given = mechanism.summarise(heads, key_padding_mask), state._asdict()
    summed = {name: given[name] for name in summary.own}
    before, after = map(dict, sequence.scan(ranks, summed, summary, to_end=to_end))
    if "position" in given:
        earlier, total = ranks.counts(heads.q, key_padding_mask)
        before["position"], after["position"] = given["position"] + earlier, given["position"] + total
    o, end = mechanism.prefill_heads(heads, state._replace(**before), key_padding_mask)
    return o, end._replace(**after)

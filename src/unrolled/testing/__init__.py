"""The contract of a mechanism, as checks that you can run on your own class.

    from unrolled.testing import check_mechanism

    check_mechanism("linear")                        # a mechanism of this library
    check_mechanism(MyAttention, my_option=3)        # any class that follows the contract
    check_cell("lstm")                               # a recurrent layer, held to the same contract
    check_alignment("bahdanau")                      # attention of a recurrent decoder to its source

A mechanism is an `nn.Module` with the constructor and methods of those in `unrolled.attention`, and a class
attribute `supports` (see `unrolled.contract`). Without a recurrence, `init_state`, `prefill` and `step` must
raise UnsupportedError. The checks test each claim, and that features which are not claimed raise an error. A
failing check raises AssertionError with one sentence: what was done, what differed, and by how much. Each
check is a function `check(make, supports)` and can be run alone:

    check_padding(Maker(MyAttention, {"my_option": 3}), MyAttention.supports)

The checks run on the CPU in a few seconds, and need no test framework.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from unrolled import attention
from unrolled import recurrent as cells
from unrolled.contract import Supports
from unrolled.testing._kit import CellMaker, Maker, recurrent, run_all
from unrolled.testing.alignment import ALIGNMENT_CHECKS, AlignmentMaker, check_alignment
from unrolled.testing.claims import (
    check_max_length,
    check_refuses_unclaimed_verbs,
    check_single_queries,
    check_weights,
)
from unrolled.testing.dependence import (
    check_global_mask,
    check_positions,
    check_reads_input,
    check_reads_tokens,
)
from unrolled.testing.forms import (
    check_forms_agree,
    check_gradients_through_state,
    check_head_shapes,
    check_short_and_empty,
)
from unrolled.testing.leaks import (
    check_batch_independence,
    check_no_future_leak,
    check_packing,
    check_prefix_invariance,
)
from unrolled.testing.masks import check_attn_mask, check_cross_attention, check_nothing_to_attend
from unrolled.testing.modules import (
    check_compiles,
    check_copies,
    check_deterministic,
    check_dynamic_length,
    check_global_randomness,
    check_state_dict,
)
from unrolled.testing.numerics import check_dtypes, check_half_precision
from unrolled.testing.padding import check_padding, check_padding_content
from unrolled.testing.refusals import (
    check_refuses_unclaimed,
    check_rejects_other_states,
    check_rejects_wrong_input,
)
from unrolled.testing.sequence import check_sequence
from unrolled.testing.states import (
    check_constant_state,
    check_interleaved_sequences,
    check_state_is_a_value,
    check_state_round_trip,
    check_state_structure,
)

__all__ = [
    "ALIGNMENT_CHECKS",
    "CHECKS",
    "AlignmentMaker",
    "CellMaker",
    "Maker",
    "check_alignment",
    "check_attn_mask",
    "check_batch_independence",
    "check_cell",
    "check_compiles",
    "check_constant_state",
    "check_copies",
    "check_cross_attention",
    "check_deterministic",
    "check_dtypes",
    "check_dynamic_length",
    "check_forms_agree",
    "check_global_mask",
    "check_global_randomness",
    "check_gradients_through_state",
    "check_half_precision",
    "check_head_shapes",
    "check_interleaved_sequences",
    "check_max_length",
    "check_mechanism",
    "check_no_future_leak",
    "check_nothing_to_attend",
    "check_packing",
    "check_padding",
    "check_padding_content",
    "check_positions",
    "check_prefix_invariance",
    "check_reads_input",
    "check_reads_tokens",
    "check_refuses_unclaimed",
    "check_refuses_unclaimed_verbs",
    "check_rejects_other_states",
    "check_rejects_wrong_input",
    "check_sequence",
    "check_short_and_empty",
    "check_single_queries",
    "check_state_dict",
    "check_state_is_a_value",
    "check_state_round_trip",
    "check_state_structure",
    "check_weights",
    "checks",
]

Check = Callable[[Maker, Supports], None]

CHECKS: dict[Check, Callable[[Supports], bool]] = {
    check_refuses_unclaimed: lambda s: True,
    check_refuses_unclaimed_verbs: lambda s: True,
    check_rejects_wrong_input: lambda s: True,
    check_short_and_empty: lambda s: True,
    check_head_shapes: lambda s: True,
    check_dtypes: lambda s: True,
    check_half_precision: lambda s: True,
    check_deterministic: lambda s: True,
    check_global_randomness: lambda s: True,
    check_state_dict: lambda s: True,
    check_copies: lambda s: True,
    check_batch_independence: lambda s: True,
    check_no_future_leak: lambda s: s.causal,
    check_prefix_invariance: lambda s: s.causal,
    check_forms_agree: recurrent,
    check_gradients_through_state: recurrent,
    check_state_is_a_value: recurrent,
    check_interleaved_sequences: recurrent,
    check_state_round_trip: recurrent,
    check_state_structure: recurrent,
    check_rejects_other_states: recurrent,
    check_constant_state: lambda s: recurrent(s) and s.recurrence == "constant",
    check_padding: lambda s: s.padding,
    check_padding_content: lambda s: s.padding,
    check_packing: lambda s: s.packing,
    check_cross_attention: lambda s: s.cross,
    check_attn_mask: lambda s: s.attn_mask,
    check_weights: lambda s: s.weights,
    check_single_queries: lambda s: s.single_queries,
    check_max_length: lambda s: s.max_length,
    check_positions: lambda s: s.positions,
    check_reads_input: lambda s: True,
    check_reads_tokens: lambda s: True,
    check_global_mask: lambda s: s.global_mask and s.bidirectional,
    check_nothing_to_attend: lambda s: s.padding or s.cross or s.attn_mask,
    check_sequence: lambda s: True,
    check_compiles: lambda s: True,
    check_dynamic_length: lambda s: True,
}
"""All checks, each with the claims that require it."""


def checks(supports: Supports) -> list[Check]:
    """List the checks that a mechanism with these claims must pass."""
    return [check for check, required in CHECKS.items() if required(supports)]


def check_mechanism(name_or_class: str | type[nn.Module], **options: Any) -> list[str]:
    """Run all checks that the claims of a mechanism require.

    Args:
        name_or_class: a name in `unrolled.attention`, or any class that follows the contract.
        options: passed to its constructor; `d_model` (16) and `n_heads` (4) may be given too. With `causal`,
            only this direction is checked. The checks read up to 320 tokens, so a `max_length` must be at
            least 320.

    Returns:
        The names of the checks that ran; all of them passed.

    Raises:
        AssertionError: a claim does not hold; the message says what differed and by how much.
        ValueError: there is no mechanism of that name.

    Exceptions raised by the mechanism itself are passed on with a note that names the check.
    """
    mechanism = attention.load(name_or_class) if isinstance(name_or_class, str) else name_or_class
    sizes = {name: options.pop(name) for name in ("d_model", "n_heads", "causal") if name in options}
    make = Maker(mechanism, options, **sizes)
    return run_all(checks(make.supports), mechanism, make, make.supports)


def check_cell(name_or_class: str | type[nn.Module], **options: Any) -> list[str]:
    """Run all checks that the claims of a recurrent layer require, as `check_mechanism` does.

    Args:
        name_or_class: a name in `unrolled.recurrent`, or any class that follows `RecurrentLayer`.
        options: passed to its constructor after `input_size` and `hidden_size`. Both sizes are `d_model`, 16
            by default, which may be among the options.

    Returns:
        The names of the checks that ran; all of them passed.

    Raises:
        AssertionError: a claim does not hold; the message says what differed and by how much.
        ValueError: there is no cell of that name.
    """
    cell = cells.load(name_or_class) if isinstance(name_or_class, str) else name_or_class
    sizes = {"d_model": options.pop("d_model")} if "d_model" in options else {}
    make = CellMaker(cell, options, **sizes)
    return run_all(checks(make.supports), cell, make, make.supports)

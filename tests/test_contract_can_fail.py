"""Every check of the contract can fail: a mechanism with one defect is found, by that check and no other.

Each defect is one that a library of attention has shipped, made as small as it can be. Where a defect breaks
several promises at once, all the checks that must notice are listed.
"""

import re
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from plain_linear import PlainLinear
from torch import Tensor

from unrolled.attention.aft import AFT
from unrolled.attention.longformer import LongformerAttention
from unrolled.attention.softmax import SoftmaxAttention
from unrolled.contract import UnsupportedError
from unrolled.ops.state import map_tensors
from unrolled.testing import (
    CHECKS,
    Maker,
    check_compiles,
    check_dynamic_length,
    check_global_mask,
    check_half_precision,
    check_head_shapes,
    check_max_length,
    check_mechanism,
    check_padding_content,
    check_positions,
    check_reads_input,
    check_reads_tokens,
    check_refuses_unclaimed,
    check_refuses_unclaimed_verbs,
    check_rejects_wrong_input,
    check_sequence,
    check_single_queries,
    check_weights,
    checks,
)

SLOW = (check_compiles, check_dynamic_length, check_half_precision, check_padding_content)
ALL = PlainLinear.supports
ONLY_FORWARD = replace(ALL, padding=False, packing=False, cross=False, attn_mask=False, recurrence="none")


class OfDefaultHeads(Maker):
    """Has the checks try no other head shapes."""

    def __call__(self, *, causal, dtype=None, seed=0, **overrides):
        if overrides:
            raise UnsupportedError("only the default head shapes are tried")
        return super().__call__(causal=causal, dtype=dtype, seed=seed)


def failures(mechanism, noticed):
    """Name the checks that fail.

    Checks that should pass try the default head shapes only, and the slow ones among them do not run.
    """
    failed = set()
    for check in checks(mechanism.supports):
        if name(check) not in noticed and check in SLOW:
            continue
        make = Maker if name(check) in noticed else OfDefaultHeads
        try:
            check(make(mechanism), mechanism.supports)
        except Exception:
            failed.add(name(check))
    return failed


def name(check):
    return check.__name__.removeprefix("check_")


# ---- forms


class LongPrefillDiffers(PlainLinear):
    def prefill(self, x, state, **masks):
        y, state = super().prefill(x, state, **masks)
        return y * (1 + 1e-9 * (x.shape[1] > 64)), state


class LongPrefillStartsAfresh(PlainLinear):
    def prefill(self, x, state, **masks):
        if x.shape[1] > 64:
            state = self.init_state(len(x))
        return super().prefill(x, state, **masks)


class ForgetsWithoutAutograd(PlainLinear):
    def prefill(self, x, state, **masks):
        return super().prefill(x, state if torch.is_grad_enabled() else self.init_state(len(x)), **masks)


class LongPrefillDropsAGradient(PlainLinear):
    def project(self, query, key, value):
        q, k, v = super().project(query, key, value)
        return q, k.detach() if self.in_prefill and k.shape[1] > 70 else k, v

    in_prefill = False

    def prefill(self, x, state, **masks):
        self.in_prefill = True
        try:
            return super().prefill(x, state, **masks)
        finally:
            self.in_prefill = False


class UndoesDetach(PlainLinear):
    """Keeps the last state with its graph, and prefers it to an equal one that was passed in."""

    last = None

    def prefill(self, x, state, **masks):
        if self.last is not None and torch.equal(self.last.kv, state.kv):
            state = self.last
        y, self.last = super().prefill(x, state, **masks)
        return y, self.last


class IgnoresGroups(PlainLinear):
    def __init__(self, d_model, n_heads, *, n_kv_heads=None, **options):
        if n_kv_heads and n_heads % n_kv_heads:
            raise ValueError("n_heads is no multiple of n_kv_heads")
        super().__init__(d_model, n_heads, **options)


class NeedsABatch(PlainLinear):
    def project(self, query, key, value):
        return super().project(query.reshape(len(query), -1, self.d_model), key, value)


class EmptyIsLeftOut(PlainLinear):
    def forward(self, query, key=None, value=None, **masks):
        y = super().forward(query, key, value, **masks)
        return y if query.shape[1] else torch.zeros_like(y)


# ---- leaks


class FutureInTheNormaliser(PlainLinear):
    """The stabiliser is a maximum over the whole sequence: invisible but for the last bits."""

    def forward(self, query, key=None, value=None, **masks):
        y = super().forward(query, key, value, **masks)
        plain = self.causal and key is None and not masks
        return y * (1 + 1e-15 * query.amax(1, keepdim=True)) if plain and query.numel() else y


class DependsOnLength(PlainLinear):
    supports = replace(ONLY_FORWARD, bidirectional=False)

    def merge(self, num, den, dtype):
        return super().merge(num, den * (1 + 1e-6 * den.shape[1]), dtype)


class ReadsOtherRows(PlainLinear):
    def forward(self, query, key=None, value=None, **masks):
        y = super().forward(query, key, value, **masks)
        return y + 1e-14 * query.mean(0) if key is None and not masks and len(query) else y


class PaddingInTheNormaliser(PlainLinear):
    supports = replace(ALL, attn_mask=False)

    def attend(self, q, k, v, allowed):
        _, den = super().attend(
            q, k, v, allowed.any(0, keepdim=True).expand_as(allowed)
        )  # row 0 has no padding
        return super().attend(q, k, v, allowed)[0], den


class PaddingIsProjected(PlainLinear):
    """Gives padding no weight, and yet lets the projections see it."""

    def hide(self, x, padding):
        return x


class PaddingByMultiplication(PlainLinear):
    """Masks with `* 0`, which leaves NaN of what is not finite."""

    def hide(self, x, padding):
        return x * ~padding[:, :, None]


class PackingOffByOne(PlainLinear):
    def owners(self, cu_seqlens, length):
        return torch.bucketize(torch.arange(length), cu_seqlens[1:])


# ---- masks


class IgnoresValue(PlainLinear):
    def forward(self, query, key=None, value=None, **masks):
        return super().forward(
            query, key, value if value is None or value.shape != key.shape else key, **masks
        )


class AlignsTopLeft(PlainLinear):
    def attend(self, q, k, v, allowed):
        T, S = allowed.shape[2:]
        return super().attend(q, k, v, torch.ones_like(allowed).tril() if self.causal and T != S else allowed)


class InvertsAttnMask(PlainLinear):
    def forward(self, query, key=None, value=None, *, attn_mask=None, **masks):
        inverted = ~attn_mask if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
        return super().forward(query, key, value, attn_mask=inverted, **masks)


class OneMaskForAllHeads(PlainLinear):
    def forward(self, query, key=None, value=None, *, attn_mask=None, **masks):
        attn_mask = attn_mask[:, :1] if attn_mask is not None and attn_mask.dim() == 4 else attn_mask
        return super().forward(query, key, value, attn_mask=attn_mask, **masks)


class NoPaddingBesideAMask(PlainLinear):
    def forward(self, query, key=None, value=None, *, attn_mask=None, key_padding_mask=None, **masks):
        padding = key_padding_mask if attn_mask is None else None
        return super().forward(query, key, value, attn_mask=attn_mask, key_padding_mask=padding, **masks)


class NoMaskInCrossAttention(PlainLinear):
    def forward(self, query, key=None, value=None, *, attn_mask=None, **masks):
        return super().forward(query, key, value, attn_mask=attn_mask if key is None else None, **masks)


class NothingIsNaN(PlainLinear):
    supports = replace(ALL, padding=False)

    def merge(self, num, den, dtype):
        return super().merge(num / den[..., None], torch.ones_like(den), dtype)


class NothingHasNaNGradient(PlainLinear):
    supports = replace(ALL, padding=False)

    def merge(self, num, den, dtype):
        out = torch.where(den[..., None] == 0, 0, num / den[..., None])
        return super().merge(out, torch.ones_like(den), dtype)


# ---- states


class StepsInPlace(PlainLinear):
    """Updates the caller's state where autograd does not forbid it."""

    def step(self, x_t, state):
        y, new = super().step(x_t, state)
        if torch.is_grad_enabled():
            return y, new
        state.kv.copy_(new.kv)
        state.k_sum.copy_(new.k_sum)
        return y, state


class CacheState(NamedTuple):
    kv: Tensor
    k_sum: Tensor
    slots: Tensor


class WritesAnUnusedSlot(PlainLinear):
    """Harmless as long as the state is continued once: a preallocated cache, appended to in place."""

    state_type = CacheState

    def init_state(self, batch_size):
        state = super().init_state(batch_size)
        return CacheState(*state, state.k_sum.new_zeros(batch_size, 4))

    def prefill(self, x, state, **masks):
        y, new = super().prefill(x, state, **masks)
        state.slots[:, 0] += x.shape[1]
        return y, CacheState(*new, state.slots)


class GrowsWhileConstant(WritesAnUnusedSlot):
    def prefill(self, x, state, **masks):
        y, new = PlainLinear.prefill(self, x, state, **masks)
        return y, CacheState(*new, torch.cat([state.slots, state.slots.new_zeros(*x.shape[:2])], 1))


class KeepsThePrompt(PlainLinear):
    """The state after the last token is a slice of the states after all tokens."""

    def prefill(self, x, state, **masks):
        y, new = super().prefill(x, state, **masks)
        return y, new._replace(k_sum=new.k_sum.expand(x.shape[1] + 1, *new.k_sum.shape).clone()[-1])


class ForwardDisturbsStep(PlainLinear):
    """Leaves something of the last sequence on the module, which a running step picks up."""

    disturbance = 0.0

    def init_state(self, batch_size):
        self.disturbance = 0.0
        return super().init_state(batch_size)

    def forward(self, query, key=None, value=None, **masks):
        self.disturbance = float(query.detach().sum()) if query.dim() == 3 else 0.0
        return super().forward(query, key, value, **masks)

    def step(self, x_t, state):
        y, state = super().step(x_t, state)
        return y + self.disturbance, state


class StateOfThisInstance(PlainLinear):
    """Writes states in units that only this very object knows."""

    instances = 0

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        StateOfThisInstance.instances += 1
        self.unit = float(StateOfThisInstance.instances)

    def prefill(self, x, state, **masks):
        y, new = super().prefill(x, map_tensors(lambda s: s * self.unit, state), **masks)
        return y, map_tensors(lambda s: s / self.unit, new)


class StateInTheInputType(PlainLinear):
    def init_state(self, batch_size):
        return map_tensors(lambda s: s.to(self.q_proj.weight.dtype), super().init_state(batch_size))

    def prefill(self, x, state, **masks):
        wide = super().init_state(0).kv.dtype
        y, new = super().prefill(x, map_tensors(lambda s: s.to(wide), state), **masks)
        return y, map_tensors(lambda s: s.to(x.dtype), new)


class StateNotBatchFirst(PlainLinear):
    def init_state(self, batch_size):
        return map_tensors(lambda s: s.transpose(0, 1), super().init_state(batch_size))

    def prefill(self, x, state, **masks):
        y, new = super().prefill(x, map_tensors(lambda s: s.transpose(0, 1), state), **masks)
        return y, map_tensors(lambda s: s.transpose(0, 1), new)


# ---- numbers


class ReturnsSinglePrecision(PlainLinear):
    def forward(self, query, key=None, value=None, **masks):
        y = super().forward(query, key, value, **masks)
        return y if y.dtype == torch.float64 else y.float()


class NormalisesInTheInputType(PlainLinear):
    """Sums the keys in bf16, which stops growing once a term is below half a unit of the sum."""

    def attend(self, q, k, v, allowed):
        num, den = super().attend(q, k, v, allowed)
        if self.out_proj.weight.dtype == torch.bfloat16 and self.causal:
            running, sums = torch.zeros_like(k[:, 0]).bfloat16(), []
            for k_t in k.bfloat16().unbind(1):
                running = running + k_t
                sums.append(running)
            den = torch.einsum("bthd,bthd->bth", q, torch.stack(sums, 1).to(q.dtype))
        return num, den


# ---- modules


class RedrawsInEval(PlainLinear):
    supports = ONLY_FORWARD
    calls = 0

    def phi(self, x):
        self.calls += 1
        generator = torch.Generator().manual_seed(self.calls)
        return super().phi(x) * torch.rand(x.shape[-1], generator=generator).to(x.dtype)


class UsesGlobalRandomness(PlainLinear):
    def phi(self, x):
        torch.rand(1)
        return super().phi(x)


class FeaturesOutsideTheStateDict(PlainLinear):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.scale = 1 + torch.rand(1).item()

    def merge(self, num, den, dtype):
        return super().merge(num * self.scale, den, dtype)


class BranchesOnTheLength(PlainLinear):
    def merge(self, num, den, dtype):
        return super().merge(num if den.shape[1] < 37 else num * 1, den, dtype)


class CannotBePickled(PlainLinear):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.activation = lambda x: x


class BreaksTheGraph(PlainLinear):
    def phi(self, x):
        if float(x.detach().sum()) == torch.inf:
            raise ValueError("query and key are infinite")
        return super().phi(x)


# ---- refusals


class AcceptsAnyPaddingType(PlainLinear):
    def check_mask(self, name, mask, shape):
        if name == "attn_mask" or mask.shape != shape:
            super().check_mask(name, mask, shape)


class AcceptsAnyState(PlainLinear):
    """Computes with the tensors of another mechanism's state."""

    def check_part(self, name, part, expected):
        if isinstance(part, Tensor) and part.dim() == expected.dim():
            super().check_part(name, part.to(expected), expected)
        else:
            super().check_part(name, part, expected)


class AcceptsASlice(PlainLinear):
    def refuse_slices(self):
        pass


DEFECTS = {
    LongPrefillDiffers: {"forms_agree"},
    LongPrefillStartsAfresh: {"forms_agree"},
    LongPrefillDropsAGradient: {"forms_agree"},
    UndoesDetach: {"gradients_through_state", "rejects_other_states"},
    IgnoresGroups: {"head_shapes"},
    NeedsABatch: {"short_and_empty"},
    EmptyIsLeftOut: {"short_and_empty"},
    FutureInTheNormaliser: {"no_future_leak"},
    DependsOnLength: {"prefix_invariance"},
    ReadsOtherRows: {"batch_independence"},
    PaddingInTheNormaliser: {"padding"},
    PaddingIsProjected: {"padding_content"},
    PaddingByMultiplication: {"padding_content"},
    PackingOffByOne: {"packing"},
    IgnoresValue: {"cross_attention"},
    AlignsTopLeft: {"cross_attention", "nothing_to_attend"},
    ForgetsWithoutAutograd: {"forms_agree"},
    OneMaskForAllHeads: {"attn_mask"},
    NoPaddingBesideAMask: {"attn_mask"},
    NoMaskInCrossAttention: {"attn_mask"},
    InvertsAttnMask: {"attn_mask", "nothing_to_attend"},
    NothingIsNaN: {"nothing_to_attend"},
    NothingHasNaNGradient: {"nothing_to_attend"},
    StepsInPlace: {"state_is_a_value"},
    WritesAnUnusedSlot: {"state_is_a_value", "rejects_other_states"},
    GrowsWhileConstant: {"constant_state", "rejects_other_states"},
    KeepsThePrompt: {"constant_state"},
    ForwardDisturbsStep: {"interleaved_sequences", "dynamic_length"},
    StateOfThisInstance: {"state_round_trip", "rejects_other_states"},
    StateInTheInputType: {"state_structure", "rejects_other_states"},
    StateNotBatchFirst: {"state_structure", "state_round_trip", "rejects_other_states"},
    ReturnsSinglePrecision: {"dtypes"},
    NormalisesInTheInputType: {"half_precision"},
    RedrawsInEval: {
        "deterministic",
        "copies",
        "batch_independence",
        "no_future_leak",
        "prefix_invariance",
        "dynamic_length",
    },
    UsesGlobalRandomness: {"global_randomness"},
    FeaturesOutsideTheStateDict: {"state_dict"},
    CannotBePickled: {"copies"},
    BreaksTheGraph: {"compiles", "dynamic_length"},
    BranchesOnTheLength: {"dynamic_length"},
    AcceptsAnyPaddingType: {"rejects_wrong_input"},
    AcceptsAnyState: {"rejects_other_states"},
    AcceptsASlice: {"sequence"},
}


OF_LAYERS_ONLY = (check_weights, check_single_queries, check_max_length, check_positions, check_global_mask)


class WeightsBeforeSoftmax(SoftmaxAttention):
    def weights_of(self, heads, masks):
        return super().weights_of(heads, masks).log()


class ReadForgetsThePadding(SoftmaxAttention):
    def read(self, memory, *, key_padding_mask=None):
        return super().read(memory)


class ReadsWithoutTheClaim(SoftmaxAttention):
    supports = SoftmaxAttention.supports.but(single_queries=False)

    def _read(self, memory, key_padding_mask):
        _, k, v = self.project(memory)
        return k, v


class TakesMoreThanItSays(SoftmaxAttention):
    supports = SoftmaxAttention.supports.but(max_length=True)

    def __init__(self, d_model, n_heads, *, max_length=4, **shared):
        super().__init__(d_model, n_heads, **shared)


class HasNoPositions(SoftmaxAttention):
    supports = SoftmaxAttention.supports.but(causal=False, positions=True)


class CountsThePadding(AFT):
    def prefill_heads(self, heads, state, key_padding_mask):
        o, new = super().prefill_heads(heads, state, key_padding_mask)
        return o, new._replace(position=state.position + heads.q.shape[1])


class ReadsProjectionsOnly(SoftmaxAttention):
    supports = SoftmaxAttention.supports.but(reads_input=True)


class ReadsItsInputToo(SoftmaxAttention):
    def heads_of(self, projected, x, *args, **further):
        heads = super().heads_of(projected, x, *args, **further)
        return heads._replace(v=heads.v + x.mean())


class IgnoresItsGlobalMask(LongformerAttention):
    def __init__(self, d_model, n_heads, *, window=2, **shared):
        super().__init__(d_model, n_heads, window=window, **shared)

    def read_input(self, x, global_mask=None):
        return super().read_input(x, global_mask if self.causal else None)


class AttendsToItsOwnSlice(SoftmaxAttention):
    def attend_over(self, ranks, heads, state, key_padding_mask, *, to_end=True):
        return self.prefill_heads(heads, state, key_padding_mask)


class ReadsThePastOnly(PlainLinear):
    def __init__(self, *sizes, causal=False, **options):
        super().__init__(*sizes, causal=True, **options)


class ReadsNothing(PlainLinear):
    def forward(self, query, *others, **masks):
        return self.out_proj(self.q_proj(query))


FALSE_CLAIMS = [
    (ReadsThePastOnly, check_reads_tokens, "causal=False: no output depends on a later token"),
    (ReadsNothing, check_reads_tokens, "causal=True: no output depends on an earlier token"),
    (AttendsToItsOwnSlice, check_sequence, "two slices with scan='gather' against one sequence: output of"),
    (WeightsBeforeSoftmax, check_weights, "the weights of each query, added up"),
    (ReadForgetsThePadding, check_single_queries, "recall of"),
    (ReadsWithoutTheClaim, check_refuses_unclaimed_verbs, "read .not claimed.: was accepted"),
    (TakesMoreThanItSays, check_max_length, "a token beyond max_length: was accepted"),
    (HasNoPositions, check_positions, "tokens in another order have the same outputs"),
    (CountsThePadding, check_positions, r"prefill.5. . prefill.3.: position is .8, 8., should be .6, 8."),
    (ReadsProjectionsOnly, check_reads_input, "heads depend on queries, keys and values only"),
    (ReadsItsInputToo, check_reads_input, "heads with the same queries, keys and values of another input"),
    (IgnoresItsGlobalMask, check_global_mask, "a global token does not read all others, or is not read"),
]


@pytest.mark.parametrize(("mechanism", "check", "message"), FALSE_CLAIMS)
def test_a_false_claim_of_a_layer_is_found(mechanism, check, message):
    with pytest.raises(AssertionError, match=message):
        check(Maker(mechanism), mechanism.supports)


@pytest.mark.slow
def test_the_plain_mechanism_has_no_defect():
    ran = check_mechanism(PlainLinear)
    assert ran == [check.__name__ for check in CHECKS if check not in OF_LAYERS_ONLY]


@pytest.mark.slow
def test_options_for_one_direction_are_checked_in_this_direction():
    ran = check_mechanism("window", window=3, causal=True)  # both directions need an even window
    assert "check_prefix_invariance" in ran
    ran = check_mechanism("linear", causal=False)
    assert "check_cross_attention" in ran
    assert "check_forms_agree" not in ran


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "noticed"), DEFECTS.items(), ids=[mechanism.__name__ for mechanism in DEFECTS]
)
def test_defect_is_found_by_its_check_alone(mechanism, noticed):
    assert failures(mechanism, noticed) == noticed


@pytest.mark.parametrize(
    ("field", "feature"),
    [
        ("causal", "causal=True"),
        ("bidirectional", "causal=False"),
        ("cross", "causal=True, cross-attention"),
        ("padding", "causal=True, key_padding_mask"),
        ("packing", "causal=True, cu_seqlens"),
        ("attn_mask", "causal=True, attn_mask"),
        ("recurrence", "init_state"),
    ],
)
def test_an_accepted_feature_that_is_not_claimed_is_found(field, feature):
    class Silent(PlainLinear):
        supports = replace(ALL, **{field: "none" if field == "recurrence" else False})

        def refuse(self, **used):
            super().refuse(**{name: expected for name, expected in used.items() if name != field})

    with pytest.raises(AssertionError) as failure:
        check_refuses_unclaimed(Maker(Silent), Silent.supports)
    assert str(failure.value) == f"{feature} (not claimed): was accepted, should raise UnsupportedError"


def test_a_dynamic_length_that_is_not_claimed_is_found():
    supports = replace(ALL, dynamic_length=False, bidirectional=False)
    with pytest.raises(AssertionError, match="works, but is not claimed"):
        check_dynamic_length(Maker(PlainLinear), supports)


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [False, True])
def test_a_length_that_is_fixed_with_some_common_option_alone_is_found(grouped):
    """The common options are exported together, and the message names them."""

    class Fixed(PlainLinear):
        def merge(self, num, den, dtype):
            odd = self.n_kv_heads != self.n_heads if grouped else self.head_dim == 6
            return super().merge(num * 1 if odd and den.shape[1] > 36 else num, den, dtype)

    with pytest.raises(AssertionError, match="n_kv_heads=2, head_dim=6, value_dim=10: torch"):
        check_dynamic_length(Maker(Fixed), Fixed.supports)


def test_a_fixed_number_of_rows_is_found():
    class Fixed(PlainLinear):
        def merge(self, num, den, dtype):
            return super().merge(num + num.new_zeros(len(num), *num.shape[1:]), den, dtype)

    with pytest.raises(AssertionError, match=r"default: torch\.export with a dynamic length"):
        check_dynamic_length(Maker(Fixed), Fixed.supports)


def test_options_that_a_constructor_does_not_have_are_not_tried():
    class Few(PlainLinear):
        def __init__(self, d_model, n_heads, causal=False):
            super().__init__(d_model, n_heads, causal=causal)

    for check in (check_head_shapes, check_rejects_wrong_input):
        check(Maker(Few), Few.supports)


def test_a_missing_verb_is_no_refusal():
    class NoStep(PlainLinear):
        supports = replace(ALL, recurrence="none")
        step = property()

    with pytest.raises(AssertionError, match=r"step \(not claimed\): raised AttributeError"):
        check_refuses_unclaimed(Maker(NoStep), NoStep.supports)


def test_a_failure_says_what_differed_and_by_how_much():
    with pytest.raises(AssertionError) as failure:
        check_mechanism(LongPrefillDiffers)
    assert re.fullmatch(
        r"default: prefill\(64\) \+ prefill\(69\) against forward: output differs by \S+e-\d+ at "
        r"\[\d, \d+, \d+\] \(\S+, should be \S+\); \S+e-12 is allowed",
        str(failure.value),
    )
    assert failure.value.__notes__ == ["in check_forms_agree of LongPrefillDiffers"]


def test_options_reach_the_constructor():
    with pytest.raises(TypeError, match="feature_map"):
        check_mechanism(PlainLinear, feature_map="elu")


def test_every_check_has_a_defect_that_it_finds():
    found = set().union(*DEFECTS.values()) | {name(check) for _, check, _ in FALSE_CLAIMS}
    assert found | {"refuses_unclaimed"} == {name(check) for check in CHECKS}

"""Every mechanism that reads a memory keeps its contract, in each of its named forms."""

import math

import pytest
import torch

from unrolled import alignment
from unrolled.alignment.base import Alignment
from unrolled.alignment.hard import GatedSoftAttention, StraightThroughAttention
from unrolled.alignment.luong import (
    FlooredPredictiveAttention,
    LocalMonotonicAttention,
    LocalPredictiveAttention,
    LuongAttention,
    ScaledScoresAttention,
)
from unrolled.models import Decoder, DecoderConfig
from unrolled.testing import ALIGNMENT_CHECKS, AlignmentMaker, check_alignment
from unrolled.testing.alignment import check_alignment_compiles

NAMES = alignment.names()
FORMS = [
    *((alignment.load(name), {}) for name in NAMES),
    *((LuongAttention, {"score": name}) for name in ("concat", "query_concat", "location")),
    (LuongAttention, {"score": "dot", "memory_dim": 12}),
    (LocalMonotonicAttention, {"window": 2}),
    (LocalPredictiveAttention, {"window": 2}),
    (LocalPredictiveAttention, {"window": 9, "sigma": math.inf, "score": "location"}),
    (FlooredPredictiveAttention, {"window": 2}),
    (ScaledScoresAttention, {"window": 2, "score": "concat"}),
    (StraightThroughAttention, {}),
    (GatedSoftAttention, {}),
]

COMPILED = {alignment.load(name).__name__ for name in NAMES} | {"LocalPredictiveAttention"}


@pytest.mark.parametrize(
    ("form", "options", "check"),
    [
        pytest.param(
            form,
            options,
            check,
            id=f"{form.__name__}-{options}-{check.__name__[6:]}",
            marks=[pytest.mark.compilers] if check is check_alignment_compiles else [],
        )
        for form, options in FORMS
        for check in ALIGNMENT_CHECKS
        if check is not check_alignment_compiles
        or form.__name__ in COMPILED  # the others: the same operations
    ],
)
def test_contract(form, options, check):
    options = dict(options)
    sizes = {"memory_dim": options.pop("memory_dim")} if "memory_dim" in options else {}
    check(AlignmentMaker(form, options, **sizes))


def test_each_file_is_an_alignment_by_its_name():
    assert NAMES == ["bahdanau", "cosine", "fixed", "hard", "luong"]
    with pytest.raises(ValueError, match="attention is 'linear', but must be one of bahdanau,"):
        alignment.load("linear")


def test_a_transformer_has_none_of_them():
    with pytest.raises(ValueError, match=r"attention is 'bahdanau', but must be one of .*linear"):
        Decoder(DecoderConfig(7, d_model=8, n_heads=2, n_layers=1, attention="bahdanau"))


# ---- the suite can fail


class ReadsPadding(Alignment):
    """Scores at padding are multiplied by 0 rather than masked, so that padding keeps a weight."""

    def scores(self, query, state):
        return query[..., : state.keys.shape[-1]] @ state.keys.mT

    def weigh(self, query, state):
        return (self.scores(query, state) * ~state.padding.unsqueeze(1)).softmax(-1)


class Proper(ReadsPadding):
    weigh = Alignment.weigh


class CountsNoQueries(Proper):
    def recall(self, query, state):
        context, weights, _ = super().recall(query, state)
        return context, weights, state


class LooksAtThePositionOfTheFirst(Proper):
    """Right for single queries; of several it takes the position of its first query for all of them."""

    def weigh(self, query, state):
        scores = self.scores(query, state)
        near = -(torch.arange(scores.shape[-1]) - state.position[:, None, None]).abs()
        return (scores + near).masked_fill(state.padding.unsqueeze(1), -1e30).softmax(-1)


class ChangesItsState(Proper):
    def recall(self, query, state):
        state.position.add_(query.shape[1])
        context, weights, _ = super().recall(query, state)
        return context, weights, state


class KeepsTheMemory(Proper):
    def read(self, memory, **masks):
        self.state = super().read(memory, **masks)
        return self.state

    def recall(self, query, state):
        context, weights, after = super().recall(query, self.state._replace(position=state.position))
        return context, weights, after._replace(memory=state.memory, keys=state.keys, padding=state.padding)


class WeighsTwice(Proper):
    def weigh(self, query, state):
        return 2 * super().weigh(query, state)


class TellsOtherWeights(Proper):
    def recall(self, query, state):
        context, weights, state = super().recall(query, state)
        shares = (weights > 0).to(weights)
        return context, shares / shares.sum(-1, keepdim=True).clamp(min=1), state


class ForwardWithoutItsMask(Proper):
    def forward(self, query, memory, *, key_padding_mask=None):
        return super().forward(query, memory)


class IsNaNWithoutMemory(Proper):
    def weigh(self, query, state):
        return self.scores(query, state).masked_fill(state.padding.unsqueeze(1), -torch.inf).softmax(-1)


class StaysInHalfPrecision(Proper):
    def read(self, memory, **masks):
        state = super().read(memory, **masks)
        return state._replace(memory=state.memory.to(memory.dtype), keys=state.keys.to(memory.dtype))


class AcceptsAnything(Proper):
    def _check(self, name, x, expected):
        pass


class Draws(Proper):
    def weigh(self, query, state):
        return super().weigh(query + 0 * torch.rand(()), state)


class ReadsValuesInPython(Proper):
    def weigh(self, query, state):
        return super().weigh(query * float(query.detach().max() > -1e9), state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (ReadsPadding, "weights_are_shares"),
        (ReadsPadding, "memory_padding"),
        (CountsNoQueries, "verbs_agree"),
        (LooksAtThePositionOfTheFirst, "verbs_agree"),
        (ChangesItsState, "memory_state_is_a_value"),
        (KeepsTheMemory, "memory_state_is_a_value"),
        (KeepsTheMemory, "memory_state_round_trip"),
        (WeighsTwice, "weights_are_shares"),
        (TellsOtherWeights, "weights_are_shares"),
        (ForwardWithoutItsMask, "verbs_agree"),
        (IsNaNWithoutMemory, "nothing_to_read"),
        (StaysInHalfPrecision, "memory_dtypes"),
        (AcceptsAnything, "memory_refusals"),
        (Draws, "memory_module"),
        (ReadsValuesInPython, "alignment_compiles"),
    ],
)
def test_a_broken_promise_is_found(broken, check):
    checks = {c.__name__.removeprefix("check_"): c for c in ALIGNMENT_CHECKS}
    checks[check](AlignmentMaker(Proper))
    with pytest.raises(Exception):  # noqa: B017, PT011 an AssertionError, or what the defect itself raises
        checks[check](AlignmentMaker(broken))


@pytest.mark.slow
def test_all_checks_run_by_name_and_a_failure_names_its_check():
    assert check_alignment("cosine", query_dim=5) == [c.__name__ for c in ALIGNMENT_CHECKS]
    with pytest.raises(AssertionError, match="padding gets a weight") as failure:
        check_alignment(ReadsPadding)
    assert failure.value.__notes__[-1].startswith("in check_")

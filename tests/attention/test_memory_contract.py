"""Every mechanism that reads a memory keeps its contract, in each of its named forms."""

import math

import pytest
import torch

from unrolled import attention
from unrolled.attention._memory import MemoryAttention
from unrolled.attention.hard import GatedSoftAttention, StraightThroughAttention
from unrolled.attention.luong import (
    FlooredPredictiveAttention,
    LocalMonotonicAttention,
    LocalPredictiveAttention,
    LuongAttention,
    ScaledScoresAttention,
)
from unrolled.contract import UnsupportedError
from unrolled.models import Decoder, DecoderConfig, Encoder, EncoderConfig
from unrolled.testing import MEMORY_CHECKS, MemoryMaker, check_memory_attention
from unrolled.testing.memory import check_memory_compiles

NAMES = [name for name in attention.names() if issubclass(attention.load(name), MemoryAttention)]
FORMS = [
    *((attention.load(name), {}) for name in NAMES),
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

COMPILED = {attention.load(name).__name__ for name in NAMES} | {"LocalPredictiveAttention"}


@pytest.mark.parametrize(
    ("form", "options", "check"),
    [
        pytest.param(form, options, check, id=f"{form.__name__}-{options}-{check.__name__[6:]}")
        for form, options in FORMS
        for check in MEMORY_CHECKS
        if check is not check_memory_compiles or form.__name__ in COMPILED  # the others: the same operations
    ],
)
def test_contract(form, options, check):
    options = dict(options)
    sizes = {"memory_dim": options.pop("memory_dim")} if "memory_dim" in options else {}
    check(MemoryMaker(form, options, **sizes))


def test_the_four_files_are_there():
    assert NAMES == ["bahdanau", "cosine", "fixed", "hard", "luong"]


@pytest.mark.parametrize("name", NAMES)
def test_a_transformer_refuses_them_by_name(name):
    with pytest.raises(UnsupportedError, match=f"'{name}' attention cannot be causal; use one of .*'linear'"):
        Decoder(DecoderConfig(7, d_model=8, n_heads=2, n_layers=1, attention=name))
    with pytest.raises(UnsupportedError, match=f"'{name}' attention cannot be bidirectional; use one of"):
        Encoder(EncoderConfig(7, d_model=8, n_heads=2, n_layers=1, attention=name, n_classes=2))


# ---- the suite can fail


class ReadsPadding(MemoryAttention):
    """Scores at padding are multiplied by 0 rather than masked, so that padding keeps a weight."""

    def scores(self, query, state):
        return query[..., : state.keys.shape[-1]] @ state.keys.mT

    def weigh(self, query, state):
        return (self.scores(query, state) * ~state.padding.unsqueeze(1)).softmax(-1)


class Proper(ReadsPadding):
    weigh = MemoryAttention.weigh


class CountsNoQueries(Proper):
    def prefill(self, query, state):
        context, weights, _ = super().prefill(query, state)
        return context, weights, state


class LooksAtThePositionOfTheFirst(Proper):
    """Right for steps; a prefill takes the position of its first query for all of them."""

    def weigh(self, query, state):
        scores = self.scores(query, state)
        near = -(torch.arange(scores.shape[-1]) - state.position[:, None, None]).abs()
        return (scores + near).masked_fill(state.padding.unsqueeze(1), -1e30).softmax(-1)


class ChangesItsState(Proper):
    def prefill(self, query, state):
        state.position.add_(query.shape[1])
        context, weights, _ = super().prefill(query, state)
        return context, weights, state


class KeepsTheMemory(Proper):
    def init_state(self, memory, **masks):
        self.state = super().init_state(memory, **masks)
        return self.state

    def prefill(self, query, state):
        context, weights, after = super().prefill(query, self.state._replace(position=state.position))
        return context, weights, after._replace(memory=state.memory, keys=state.keys, padding=state.padding)


class WeighsTwice(Proper):
    def weigh(self, query, state):
        return 2 * super().weigh(query, state)


class ForwardWithoutItsMask(Proper):
    def forward(self, query, memory, *, key_padding_mask=None):
        return super().forward(query, memory)


class IsNaNWithoutMemory(Proper):
    def weigh(self, query, state):
        return self.scores(query, state).masked_fill(state.padding.unsqueeze(1), -torch.inf).softmax(-1)


class StaysInHalfPrecision(Proper):
    def init_state(self, memory, **masks):
        state = super().init_state(memory, **masks)
        return state._replace(memory=state.memory.to(memory.dtype), keys=state.keys.to(memory.dtype))


class AcceptsAnything(Proper):
    def _check(self, name, x, wanted):
        pass


class Draws(Proper):
    def weigh(self, query, state):
        return super().weigh(query + 0 * torch.rand(()), state)


class ReadsValuesInPython(Proper):
    def weigh(self, query, state):
        return super().weigh(query * float(query.detach().max() > -1e9), state)


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
        (ForwardWithoutItsMask, "verbs_agree"),
        (IsNaNWithoutMemory, "nothing_to_read"),
        (StaysInHalfPrecision, "memory_dtypes"),
        (AcceptsAnything, "memory_refusals"),
        (Draws, "memory_module"),
        (ReadsValuesInPython, "memory_compiles"),
    ],
)
def test_a_broken_promise_is_found(broken, check):
    checks = {c.__name__.removeprefix("check_"): c for c in MEMORY_CHECKS}
    checks[check](MemoryMaker(Proper))
    with pytest.raises(Exception):  # noqa: B017, PT011 an AssertionError, or what the defect itself raises
        checks[check](MemoryMaker(broken))


def test_all_checks_run_by_name_and_a_failure_names_its_check():
    assert check_memory_attention("cosine", query_dim=5) == [c.__name__ for c in MEMORY_CHECKS]
    with pytest.raises(AssertionError, match="padding gets a weight") as failure:
        check_memory_attention(ReadsPadding)
    assert failure.value.__notes__[-1].startswith("in check_")

"""The directory is the registry."""

import re
from pathlib import Path

import pytest
from torch import nn

from unrolled import alignment, attention, recurrent
from unrolled.attention.linear import LinearAttention
from unrolled.contract import UnsupportedError


def test_every_file_is_a_mechanism_by_its_name():
    assert {"linear", "softmax"} <= set(attention.names())
    assert attention.names() == sorted(attention.names())
    assert not any(name.startswith("_") for name in attention.names())
    for name in attention.names():
        assert issubclass(attention.load(name), nn.Module)
    assert attention.load("linear") is LinearAttention


@pytest.mark.parametrize("name", ["perfomer", "base", "_window", ""])
def test_an_unknown_name_is_answered_with_the_known_ones(name):
    with pytest.raises(ValueError, match=f"attention is '{name}', but must be one of .*linear.*softmax"):
        attention.load(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_model": 10, "n_heads": 4}, "d_model is 10, but must be a multiple of n_heads = 4"),
        ({"n_kv_heads": 3}, "n_kv_heads is 3, but must divide n_heads = 4"),
        ({"d_model": 0}, "d_model is 0, but must be at least 1"),
        ({"n_heads": -2}, "n_heads is -2, but must be at least 1"),
        ({"head_dim": 0}, "head_dim is 0, but must be at least 1"),
        ({"value_dim": -1}, "value_dim is -1, but must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        attention.load("softmax")(**{"d_model": 16, "n_heads": 4} | arguments)


@pytest.mark.parametrize("name", attention.names())
def test_a_missing_direction_or_rotation_is_refused_with_its_reason(name):
    mechanism = attention.load(name)
    supports = mechanism.supports
    wrong = {True: supports.causal, False: supports.bidirectional}
    refused = [({"causal": causal}, mechanism.one_way) for causal, claimed in wrong.items() if not claimed]
    if mechanism.no_rotary is not None:
        refused.append(({"causal": supports.causal, "rotary": True}, mechanism.no_rotary))
    for options, reason in refused:
        with pytest.raises(UnsupportedError, match=re.escape(reason)):
            mechanism(8, 2, **options)


def test_a_mechanism_without_a_pattern_names_those_that_have_one():
    having = [
        x for x in attention.names() if attention.load(x).pattern is not attention.MultiHeadAttention.pattern
    ]
    with pytest.raises(UnsupportedError, match=f"; {', '.join(having[:-1])} and {having[-1]} have one"):
        attention.load("softmax")(8, 2).pattern(4)


@pytest.mark.parametrize("registry", [alignment, attention, recurrent])
def test_editors_are_told_the_class_of_each_name(registry):
    stub = (Path(registry.__path__[0]) / "__init__.pyi").read_text()
    overloads = re.findall(r'def load\(name: Literal\["(\w+)"\]\) -> type\[(\w+)\]', stub)
    assert len(overloads) >= 5
    assert {name: registry.load(name).__name__ for name, _ in overloads} == dict(overloads)

"""The table of costs: as text, in Markdown, and beside measured exponents."""

import re

import pytest
import torch
from commands import error, works

from unrolled import attention
from unrolled.bench import layer_times
from unrolled.cli.table import COUNTED, LAYERS, SYMBOLS, cells


def printed(*arguments):
    return works("table", *arguments).stdout


def test_the_rows_of_the_published_table_are_there():
    rows = {row[0]: row[1:] for row in cells()}
    assert rows["full attention"][:3] == ["n² d", "O(1)", "O(1)"]
    assert rows["recurrent (LSTM)"][:3] == ["n d²", "O(n)", "O(n)"]
    assert rows["convolution"][:3] == ["k n d²", "O(1)", "O(n / k)"]
    assert rows["convolution, dilated"][2] == "O(log_k n)"
    assert rows["restricted to a window"][:3] == ["n w d", "O(1)", "O(n / w)"]
    assert rows["linear attention"][3] == "d²"


@pytest.mark.parametrize(
    "layer", [x for x in LAYERS if x.module in attention.names()], ids=lambda x: x.module
)
def test_states_are_those_that_the_mechanisms_declare(layer):
    grows = {"none": "-", "growing": True, "constant": False}[
        attention.load(layer.module).supports.recurrence
    ]
    assert (layer.state if layer.state == "-" else "n" in layer.state) == grows


def test_exponents_follow_from_the_costs():
    found = {x.name: x.exponent for x in LAYERS}
    assert found["full attention"] == found["LSTMN"] == "2"
    assert found["Sparse Transformer"] == "1.5"
    assert found["Reformer"] == "1 and log"
    assert found["linear attention"] == found["convolution, dilated"] == "1"


def test_symbols_are_explained():
    explained = set(re.findall(r"(\w) [a-z]", SYMBOLS))
    used = {letter for x in LAYERS for letter in re.findall(r"\b[a-zA-Z]\b", x.cost + x.state)}
    assert used <= explained


def test_text_and_markdown_have_the_same_cells():
    text, markdown = printed(), printed("--markdown")
    for row in cells():
        assert f"| {' | '.join(row)} |" in markdown
        assert any(re.split(r"\s{2,}", line) == row for line in text.splitlines())
    assert COUNTED in text
    assert SYMBOLS in markdown


def test_measured_exponents_stand_beside_the_formulas(monkeypatch):
    asked = []
    monkeypatch.setattr(layer_times, "growth", lambda name, lengths: asked.append((name, lengths)) or 1.25)
    text = printed("--measure", "--lengths", "64,16,32")
    assert asked == [(x.module, [16, 32, 64]) for x in LAYERS if x.module is not None]
    lines = {re.split(r"\s{2,}", line)[0]: line for line in text.splitlines()}
    assert re.search(r"\s2\s+1\.25$", lines["full attention"])
    assert re.search(r"\s2\s+-$", lines["LSTMN"])
    assert "at 16, 32, 64 tokens" in text


@pytest.mark.parametrize("name", [x.module for x in LAYERS if x.module is not None])
def test_every_layer_that_is_measured_runs(name):
    assert name in layer_times.OTHERS or name in attention.names()
    module = layer_times.layer(name, 100)
    x = torch.randn(1, 100, layer_times.D_MODEL)
    with torch.inference_mode():
        assert module(x).shape == x.shape


def test_growth_is_the_slope_of_the_times(monkeypatch):
    monkeypatch.setattr(layer_times, "seconds", lambda name, length: 1e-6 * length**1.5)
    assert layer_times.growth("linear", [64, 128, 256]) == pytest.approx(1.5)


def test_the_stride_of_the_sparse_transformer_grows_with_the_length():
    texts = [repr(layer_times.layer("sparse_transformer", n)) for n in (64, 1024)]
    strides = [int(re.search(r"stride=(\d+)", text)[1]) for text in texts]
    assert strides == [8, 32]


@pytest.mark.parametrize("lengths", ["512", "512,x", "512,512", "0,512", "1.5,2", ""])
def test_lengths_that_allow_no_fit_are_refused(lengths):
    expected = f"--lengths is '{lengths}', but must be two or more positive integers"
    for options in ([], ["--measure"]):
        assert expected in error("table", *options, "--lengths", lengths)

"""`unrolled compare` measures errors by their definition, and reports what cannot be compared."""

import json

import pytest
import torch
from commands import error, run, works

from unrolled.attention.linear import LinearAttention
from unrolled.attention.softmax import SoftmaxAttention
from unrolled.bench import comparison, mechanisms
from unrolled.bench.comparison import Settings, compare
from unrolled.contract import Supports, UnsupportedError

SMALL = {"d_model": 16, "n_heads": 2, "seconds": 0.0}


def test_a_mechanism_is_no_different_from_itself():
    rows = compare(["softmax"], [5, 9], Settings(**SMALL))
    assert [(row.mechanism, row.length, row.error) for row in rows] == [("softmax", 5, 0), ("softmax", 9, 0)]
    assert all(row.forward > 0 and row.training > row.forward and row.memory > 0 for row in rows)


@pytest.mark.parametrize("causal", [True, False])
def test_the_error_is_that_of_the_outputs_with_the_same_projections(causal):
    _, row = compare(["linear"], [12], Settings(**SMALL, causal=causal, spread=0.7))
    softmax = SoftmaxAttention(16, 2, causal=causal)
    linear = LinearAttention(16, 2, causal=causal)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        SoftmaxAttention(16, 2)
        for layer in (softmax.qkv_proj, softmax.out_proj):
            torch.nn.init.normal_(layer.weight, std=0.7 / 4)
            torch.nn.init.zeros_(layer.bias)
    linear.load_state_dict(softmax.state_dict())
    x = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(12))
    with torch.no_grad():
        y, expected = linear(x), softmax(x)
    assert row.error == pytest.approx(float((y - expected).norm() / expected.norm()), rel=1e-5)


def test_times_are_medians_of_all_turns(monkeypatch):
    taken = iter([[1.0, 2.0, 9.0], [3.0, 30.0, 4.0]])  # forward, then forward and backward
    monkeypatch.setattr(comparison, "take_turns", lambda runs, **_: dict.fromkeys(runs, next(taken)))
    [row] = compare(["softmax"], [5], Settings(**SMALL))
    assert (row.forward, row.training) == (2.0, 4.0)


def test_a_training_pass_computes_the_gradients_of_the_input_and_of_all_weights(monkeypatch):
    passes = []
    monkeypatch.setattr(
        comparison, "take_turns", lambda runs, **_: passes.append(runs) or {name: [1.0] for name in runs}
    )
    compare(["linear"], [5], Settings(**SMALL))
    _, training = passes
    layer = LinearAttention(16, 2)
    assert [x.shape for x in training["linear"]()] == [(1, 5, 16), *(x.shape for x in layer.parameters())]


def test_both_passes_have_all_seconds_of_the_settings(monkeypatch):
    given = []
    monkeypatch.setattr(
        comparison,
        "take_turns",
        lambda runs, **options: given.append(options["budget"]) or {name: [1.0] for name in runs},
    )
    compare(["linear"], [5], Settings(**SMALL | {"seconds": 7.0}))
    assert given == [7.0, 7.0]


def test_the_biases_of_aft_are_in_a_window_unless_options_say_otherwise():
    def peak(**options):
        return compare(["aft"], [60], Settings(**SMALL, options={"aft": options}))[1].memory

    assert peak() == peak(position_bias="local") != peak(position_bias="full")


def test_a_batch_of_sequences_is_measured():
    one, four = (compare(["softmax"], [32], Settings(**SMALL, batch=batch))[0].memory for batch in (1, 4))
    assert 3 * one < four <= 4 * one


def test_the_flatter_softmax_is_the_closer_comes_linear_attention():
    errors = [compare(["linear"], [64], Settings(**SMALL, spread=s))[1].error for s in (0.1, 3.0)]
    assert errors[0] < errors[1] / 2


def test_a_mechanism_that_cannot_is_reported_and_the_others_are_measured(monkeypatch):
    one_way = Supports(True, False, True, True, True, "constant")
    monkeypatch.setattr(LinearAttention, "supports", one_way)
    softmax, linear = compare(["linear"], [8], Settings(**SMALL))
    assert softmax.error == 0
    assert linear.error is None
    assert "linear attention is not bidirectional" in linear.refused
    with pytest.raises(UnsupportedError, match="not bidirectional"):
        compare(["softmax"], [8], Settings(**SMALL, against="linear"))


def test_what_needs_gigabytes_is_refused_beyond_the_limit(monkeypatch):
    monkeypatch.setattr(mechanisms, "LONGEST", 8)
    rows = compare(["similarity", "linear"], [8, 9], Settings(**SMALL))
    refused = {(row.mechanism, row.length): row.refused for row in rows if row.refused}
    assert refused == {("similarity", 9): "quadratic in the length, so up to 8 tokens only"}
    monkeypatch.setattr(comparison, "_at", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match="9 tokens are too many for topk: quadratic in the length"):
        compare(["linear"], [8, 9], Settings(**SMALL, against="topk"))


def test_a_bound_on_the_length_is_the_largest_length():
    rows = compare(["linformer", "aft"], [8, 1030], Settings(**SMALL))
    assert not any(row.refused for row in rows)
    [*_, row] = compare(["aft"], [8], Settings(**SMALL, options={"aft": {"max_length": 3}}))
    assert "max_length = 3" in row.refused


def test_an_interrupt_loses_one_length_only(tmp_path, monkeypatch):
    at = comparison._at

    def interrupted(length, *rest):
        if length == 9:
            raise KeyboardInterrupt
        return at(length, *rest)

    monkeypatch.setattr(comparison, "_at", interrupted)
    words = ["linear", "--lengths", "8,9", "--d-model", "16", "--n-heads", "2", "--seconds", "0"]
    assert run("compare", *words, "--out", tmp_path).exit_code == 130
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert [(row["mechanism"], row["length"]) for row in found["rows"]] == [("softmax", 8), ("linear", 8)]
    assert "| 8 | linear |" in (tmp_path / "comparison.md").read_text()


def test_the_command_writes_a_report(tmp_path):
    arguments = ["linear", "--lengths", "8,16", "--d-model", "16", "--n-heads", "2", "--seconds", "0"]
    options = ["--set", "linear.feature_map=relu", "--out", str(tmp_path)]
    works("compare", *arguments, *options)
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert found["settings"]["options"] == {"linear": {"feature_map": "relu"}}
    assert [row["mechanism"] for row in found["rows"]] == ["softmax", "linear"] * 2
    assert "| 16 | linear |" in (tmp_path / "comparison.md").read_text()
    assert {path.name for path in tmp_path.glob("*.png")} == {"error.png", "time.png", "memory.png"}
    works("compare", "softmax", *arguments[1:], "--out", str(tmp_path))  # its error is 0, which has no plot
    assert {path.name for path in tmp_path.glob("*.png")} == {"time.png", "memory.png"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "attention is 'nope', but must be one of"),
        (["linear", "--against", "luong"], "attention is 'luong', but must be one of"),
        (["linear", "--set", "linear.nope=1"], "invalid options for linear"),
        (["linear", "--set", "softmax"], "must look like key=value, as in performer.seed=1"),
        (["linear", "--set", "softmax=1"], "must be NAME.KEY=VALUE"),
        (["linear", "--set", "softmax.causal=true"], "which all mechanisms share: use --causal"),
        (
            ["linear", "--set", "linear.n_heads=2"],
            "--set has linear.n_heads, which all mechanisms share: use --n-",
        ),
        (["linear", "--set", "performer.seed=1"], "options are given for performer"),
        (["linear", "--lengths", "0"], "--lengths is '0', but must be positive integers"),
        (["linear", "--n-heads", "7"], "must be a multiple of n_heads = 7"),
        (["linear", "--lengths", f"8,{2**63}"], "but must be below 2^63"),
        (["linear", "--threads", "99999999"], "threads is 99999999, but must be at most 1024"),
    ],
)
def test_wrong_input_is_named(arguments, message, tmp_path):
    assert message in error("compare", *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_projections_have_no_error(tmp_path):
    options = {"linear": {"bias": False}}
    assert compare(["linear"], [8], Settings(**SMALL, options=options))[1].error is None


def test_what_cannot_be_written_or_scaled_is_found_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    for options in (["--out", tmp_path / "file"], ["--spread", 0, "--out", tmp_path], ["--seconds", "inf"]):
        error("compare", "linear", *options)  # prints no table

"""The registry of cases and its command: the list, a quick run of each case, and errors."""

import json
import re
from unittest import mock

import pytest
import torch
from commands import error, works

from unrolled.bench import cases, definitions, runner
from unrolled.bench.case import Settings
from unrolled.bench.machine import Limits
from unrolled.bench.report import Report
from unrolled.interop import onnx
from unrolled.ops import native


def test_the_list_names_every_case():
    printed = works("bench", "--list").stdout
    assert [line.split()[0] for line in printed.splitlines()] == list(cases.CASES)


def test_every_description_stands_alone():
    leaning = re.compile("[Tt]he same|`|wider")
    assert not [case.name for case in cases.CASES.values() if leaning.search(case.about)]


def test_what_is_measured():
    assert cases.CASES.keys() >= {"linear-forward", "linear-training", "step", "training", "alternation"}
    forward = cases.find("linear-forward").problem(64, Settings())
    assert [x.name for x in forward.contenders if not x.ours] == [
        "chunked PyTorch",
        "fast-transformers",
        "fla naive chunk",
        "ONNX Runtime, not normalised",
        "torch SDPA",
        "fla chunk_linear_attn, bf16",
        "fla fused_recurrent_linear_attn, bf16",
        "SDPA flash, bf16",
    ]


def test_lengths_replace_lengths_and_nothing_else():
    settings = Settings(lengths=(10, 20))
    assert cases.find("linear-forward").chosen_sizes(settings) == (10, 20)
    assert cases.find("step").chosen_sizes(settings) == (1, 16)
    assert cases.find("linear-forward").chosen_sizes(Settings())[-1] == 16_384


def test_without_kernels_no_plan_draws(monkeypatch):
    monkeypatch.setattr("unrolled.ops.native.missing", lambda: "no compiler was found")
    settings, limits = Settings(quick=True), Limits(None, "no compiler was found", 1e9, 1e9)
    rows = runner.run_problem(cases.find("drawing").problem(1, settings), settings, limits)
    assert {row.status for row in rows} == {"missing"}


def test_without_cuda_its_cases_draw_no_inputs(monkeypatch):
    monkeypatch.setattr("unrolled.bench.cuda.random_inputs", lambda *_: pytest.fail("drawn"))
    settings, limits = Settings(quick=True), Limits(None, "", 1e9, 1e9)
    for size in (100, 2048):
        problem = cases.find("cuda-delta").problem(size, Settings())
        assert problem.tokens == 32_768 // size * size
        rows = runner.run_problem(problem, settings, limits)
        assert {row.reason for row in rows} == {"it runs on --device cuda"}


def test_a_recurrence_is_defined_on_one_thread(monkeypatch):
    threads = []

    def noted(*inputs):
        threads.append(torch.get_num_threads())
        return inputs[0]

    monkeypatch.setattr(definitions, "delta", noted)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert cases.find("delta").problem(64, Settings()).definitions["channel"].results
    assert threads == [1]


@pytest.mark.slow
def test_a_quick_run_of_everything(tmp_path, monkeypatch):
    """Every case runs, and every contender that is here is right."""
    monkeypatch.setattr("unrolled.bench.plots.DPI", 40)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # more threads are slower on a busy machine
    exports = mock.Mock(wraps=onnx.export)
    monkeypatch.setattr(onnx, "export", exports)
    works("bench", "--quick", "--out", tmp_path)
    report = Report.from_json((tmp_path / "results.json").read_text())
    assert {row.case for row in report.rows} == set(cases.CASES)
    assert {row.status for row in report.rows if not row.ours} <= {"ok", "missing", "not measured"}
    without = {"missing"} if native.missing() else set()
    assert {row.status for row in report.rows if row.ours} <= {"ok", "not measured"} | without
    assert exports.call_count <= 2  # one for `step`, one for `wide-step`
    plain = [
        row for row in report.rows if row.contender == "unrolled plain" and row.case.startswith("linear")
    ]
    assert plain
    assert all(row.median > 0 and 0 < row.error < row.tolerance for row in plain)
    step = [row for row in report.rows if row.case == "step" and row.contender == "unrolled, plan in fp32"]
    assert [row.size for row in step] == [1, 2]
    assert {x.name for x in tmp_path.glob("linear-forward*.png")} == {"linear-forward-time.png"}
    assert (tmp_path / "results.md").read_text().startswith("# Benchmark\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing"], "there is no case 'nothing'; the cases are linear-forward, "),
        (
            ["step", "--only", "nobody"],
            "--only is 'nobody', but the contenders are: unrolled, plan in fp32; ",
        ),
        (["step", "--lengths", "ten"], "--lengths is 'ten', but must be positive integers separated by"),
        (["step", "--lengths", "0,5"], "--lengths is '0,5', but must be positive"),
        (["step", "--lengths", ","], "--lengths is ',', but must be positive"),
        (
            ["step", "drawing", "--lengths", "8"],
            "--lengths is '8', but must be left out: no length is varied in step, drawing",
        ),
        (["--list", "--only", "linear"], "--only is for measuring, but --list measures nothing"),
        (["step", "--device", "meta"], "--device is meta, but must be a device whose tensors hold values"),
        (["step", "--device", "nowhere"], "--device is nowhere, but must be a device of torch"),
    ],
)
def test_what_is_impossible_is_refused_in_one_sentence(arguments, sentence, tmp_path):
    assert error("bench", *arguments, "--quick", "--out", tmp_path / "out").startswith(sentence)
    assert not (tmp_path / "out").exists()


def test_one_case_alone_with_lengths_and_threads(tmp_path):
    works("bench", "linear-forward", "--quick", "--lengths", "96,32", "--threads", 2, "--out", tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["settings"]["threads"] == found["machine"]["threads"] == 2
    assert {row["case"] for row in found["rows"]} == {"linear-forward"}
    assert [row["size"] for row in found["rows"] if row["contender"] == "unrolled plain"] == [32, 96]

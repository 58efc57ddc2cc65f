"""The registry of cases and its command: the list, a quick run of each case, and errors."""

import json
import re
from unittest import mock

import pytest
import torch
from commands import error, works
from torch.utils.flop_counter import FlopCounterMode

from unrolled.bench import cases, decode, definitions, flops, images, models, runner
from unrolled.bench.case import Settings
from unrolled.bench.machine import Limits
from unrolled.bench.report import Report
from unrolled.interop import onnx
from unrolled.ops import native
from unrolled.ops.state import nbytes

SIZES = 64, 64, 64  # tokens, and features of keys and of values


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


@pytest.mark.parametrize(
    ("case", "definition", "of_head"),
    [
        ("linear-forward", "linear", flops.linear_attention(*SIZES)),
        ("linear-training", "softmax", flops.of_head("softmax", 64, 64, True)),
        ("window-128-0", "window", flops.of_head("softmax", 64, 64, False, left=128)),
        ("gla-training", "gla", flops.gated_linear_attention(*SIZES, gradients=True)),
        ("delta-training", "head", flops.delta_rule(*SIZES) + flops.delta_rule_gradient(*SIZES)),
        ("dplr", "dplr", flops.dplr(*SIZES)),
        ("dplr-training", "dplr", flops.dplr(*SIZES) + flops.dplr_gradient(*SIZES)),
    ],
)
def test_the_operations_of_a_case_are_those_of_its_eight_heads(case, definition, of_head):
    assert cases.find(case).problem(64, Settings()).definitions[definition].flops == 8 * of_head


@pytest.mark.parametrize(
    ("case", "left", "right"), [("window-128-0", 128, 0), ("window-128-128-training", 128, 128)]
)
def test_the_operations_of_a_window_are_those_of_the_pairs_in_it(case, left, right):
    pairs = sum(-left <= j - i <= right for i in range(300) for j in range(300))
    each = flops.softmax_attention(pairs, 300, 64, 64)
    if right:
        each += flops.softmax_attention_gradient(pairs, 300, 64, 64)
    assert cases.find(case).problem(300, Settings()).definitions["window"].flops == 8 * each


def test_a_window_allows_the_rounding_of_the_sums_in_it():
    short, long = (cases.find("window-128-0").problem(n, Settings()).definitions for n in (256, 512))
    assert short["window"].allowed == long["window"].allowed
    assert short["dense"].allowed < long["dense"].allowed


@pytest.mark.parametrize(
    ("case", "contender", "inputs"),
    [
        ("linear-forward", "unrolled plain", 3),
        ("linear-training", "unrolled plain", 4),
        ("gla", "unrolled plain", 4),
        ("gla-training", "unrolled plain", 5),
    ],
)
def test_the_bytes_of_a_case_are_those_of_its_inputs_and_results(case, contender, inputs):
    problem = cases.find(case).problem(64, Settings())
    [chosen] = [x for x in problem.contenders if x.name == contender]
    results = chosen.prepare()()
    expected = inputs * results[0].nbytes + sum(x.nbytes for x in results)
    assert problem.definitions[chosen.definition].nbytes == expected


@pytest.mark.parametrize(("case", "size", "batch"), [("position", 8, 1), ("images", 12, 16)])
def test_a_run_has_as_many_steps_as_it_says(case, size, batch, monkeypatch):
    problem, read = cases.find(case).problem(size, Settings(quick=True)), []
    monkeypatch.setattr("unrolled.bench.measure.planned", lambda model: model)
    step = models.Decoder.step
    monkeypatch.setattr(models.Decoder, "step", lambda *given: read.append(len(given[1])) or step(*given))
    for contender in problem.contenders:
        run = contender.prepare()
        read.clear()
        found, definition = run(), problem.definitions[contender.definition]
        assert runner.largest_error(found, definition)[0] <= definition.allowed
        assert read == [batch] * problem.steps
        assert problem.tokens == batch


def test_an_image_that_is_computed_again_has_a_level_of_each_position(monkeypatch):
    problem, read = cases.find("images-recomputed").problem(12, Settings(quick=True)), []
    forward = models.Decoder.forward
    monkeypatch.setattr(
        models.Decoder, "forward", lambda *given: read.append(given[1].shape) or forward(*given)
    )
    [contender] = problem.contenders
    contender.prepare()()
    assert read == [(16, 4), (16, 10)]  # with 3 and 9 levels before
    assert (problem.steps, problem.tokens) == (len(read), 16)


@pytest.mark.parametrize("levels", [784, 3072])
@pytest.mark.parametrize("power", [0, 1, 2, 3])
def test_two_positions_have_the_mean_time_of_all_levels(levels, power):
    places = images._positions(levels)
    exact = sum(n**power for n in range(levels)) / levels
    assert sum(n**power for n in places) / len(places) == pytest.approx(exact, rel=5e-3)


def test_a_step_of_a_batch_reads_the_weights_once_and_each_state_twice():
    small, large = (cases.find("step").problem(batch, Settings(quick=True)) for batch in (1, 3))
    one, three = small.definitions["fp32"], large.definitions["fp32"]
    model = models.decoder("linear", Settings(quick=True))
    of_one, of_three = (nbytes(model.init_state(batch)) for batch in (1, 3))
    weights = sum(x.nbytes for x in model.parameters()) - model.embedding.weight.nbytes
    assert one.flops == flops.decoder_matmuls(16, 32, 2, 8) + 4 * flops.linear_attention(1, 8, 8)
    assert three.flops == 3 * one.flops
    assert (one.nbytes, three.nbytes) == (weights + 2 * of_one, weights + 2 * of_three)
    assert (small.steps, small.tokens, large.steps, large.tokens) == (64, 1, 64, 3)


@pytest.mark.parametrize(("weights", "bits"), [("fp32", 32), ("bf16", 16), ("int8", 8), ("int4", 4.5)])
def test_a_step_reads_packed_weights_by_their_bits(weights, bits):
    model = models.decoder("linear", Settings(quick=True), width=64)
    matrices = sum(
        x.numel() for name, x in model.named_parameters() if x.dim() == 2 and "embedding" not in name
    )
    rest = sum(x.nbytes for x in model.parameters() if x.dim() == 1)
    assert decode.streamed_bytes(model, weights) == matrices * bits / 8 + rest


def test_plans_and_the_model_read_a_prompt():
    """Every contender of ours returns the logits after the last token of the prompt."""
    settings, limits = Settings(quick=True, only=("unrolled",)), Limits(None, "", 1e9, 1e9)
    rows = runner.run_problem(cases.find("prompt").problem(9, settings), settings, limits)
    assert len(rows) == 7
    assert {row.status for row in rows} == {"ok"} | ({"missing"} if native.missing() else set())


def test_the_operations_of_training_are_the_counted_products_and_the_attention():
    settings = Settings(quick=True)
    model = models.decoder("linear", settings)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model.loss(tokens, tokens).backward()
    found = counter.get_flop_counts()["Global"]
    products = found[torch.ops.aten.addmm] + found[torch.ops.aten.mm]
    attention = 2 * 2 * flops.of_head("linear", 16, 8, True)
    assert cases.find("training").problem(16, settings).definitions["linear"].flops == products + attention


def test_remarks_compare_the_times_that_they_name():
    def remark(case, size, medians):
        return cases.find(case).problem(size, Settings(quick=True)).remark(medians)

    assert remark("images", 12, {"a": 16 / 12 / 5}) == "Images per second: 5 (a)."
    both = {"unrolled native, fp32": 4.0, "unrolled native, bf16": 1.0, "unrolled plain, fp32": 1.0}
    told = "bf16 inputs take 0.25 (unrolled native) of the time of fp32."
    assert remark("linear-bf16", 64, both) == told
    alone = {"attention alone": 1.0, "product alone": 3.0, "in turn": 3.0}
    assert remark("alternation", 64, alone) == "in turn they take 0.75 of the time of both alone."


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
    assert exports.call_count <= 2  # one for each width
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
        (["linear-forward", "--lengths", f"{2**63}"], f"--lengths is '{2**63}', but must be below 2^63"),
        (["step", "--threads", "99999999"], "threads is 99999999, but must be at most 1024"),
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

"""Reports survive JSON, are written as Markdown, and have correct exponents."""

import dataclasses

import numpy as np
import pytest

from unrolled.bench.fits import exponent
from unrolled.bench.report import Report, Row, case_text, markdown, table

MACHINE = {
    "date": "2026-01-01 00:00:00+0000",
    "processor": "A processor",
    "cores": 2,
    "memory_bytes": 8_000_000_000,
    "instruction_set": "AVX2",
    "kernels": "avx2",
    "device": "cpu",
    "threads": 1,
    "load": 0.25,
    "versions": {"unrolled": "0.1", "torch": "2.13"},
}
LIMITS = {"flops": 1e11, "flops_missing": "", "copying": 2e10, "reading": 1.5e10}
FAST = Row("ours", True, "f", "case", 256, median=1e-3, least=9e-4, most=2e-3, runs=9, best_peer=2e-3)
ROWS = [
    dataclasses.replace(FAST, flops=5e10, share_of_flops=0.5, error=1e-7, tolerance=1e-6, threads=1),
    Row("peer", False, "f", "case", 256, median=2e-3, least=2e-3, most=2e-3, runs=9, best_peer=2e-3),
    Row("gone", False, "f", "case", 256, status="missing", reason="No module named 'gone'"),
    dataclasses.replace(FAST, size=512, peak_bytes=3_000_000),
    Row("peer", False, "f", "case", 512, status="wrong", reason="max error 1"),
    Row("gone", False, "f", "case", 512, status="missing", reason="No module named 'gone'"),
]


@pytest.fixture
def report() -> Report:
    settings = {"device": "cpu", "threads": 1, "seconds": 1.0, "lengths": None, "quick": False}
    return Report(MACHINE, LIMITS, settings, list(ROWS), {"case": ["N = 256: a remark."]})


def test_costs_come_with_the_power_of_the_length_that_they_grow_with(report):
    report.rows.extend(
        dataclasses.replace(FAST, contender="steep", size=n, least=1e-6 * n**2, peak_bytes=8 * n)
        for n in (256, 512, 1024)
    )
    lines = case_text(report, "case", "", "N").splitlines()
    assert "| time grows as | N^0.00 |  | N^2.00 |" in lines
    assert "| memory as |  |  | N^1.00 |" in lines


def test_json_round_trip(report):
    assert Report.from_json(report.to_json()) == report


def test_only_wrong_and_failed_ones_are_refused(report):
    assert [(row.contender, row.size) for row in report.refused] == [("peer", 512)]
    report.rows.append(Row("peer", False, "f", status="failed"))
    assert len(report.refused) == 2


def test_the_text_of_a_case(report):
    lines = case_text(report, "case", "What it asks.", "N").splitlines()
    assert lines[:2] == ["## case", ""]
    assert "| N | ours | peer |" in lines
    assert "| 256 | 1 ms | 2 ms |" in lines
    assert "| 512 | 1 ms |  |" in lines
    assert (
        "| N | contender | median | min to max | speed / best peer | GFLOP/s | of FMA peak | peak memory "
        "| error / allowed |"
    ) in lines
    assert "| 256 | ours | 1 ms | 0.9 ms to 2 ms | 2.00 | 50.0 | 50% |  | 1e-07 / 1e-06 |" in lines
    assert "| 512 | peer | wrong: max error 1 |  |  |  |  |  |  |" in lines
    assert "| all | gone | missing: No module named 'gone' |  |  |  |  |  |  |" in lines
    assert lines[-1] == "N = 256: a remark."


def test_rates_are_told_per_second_and_as_a_share(report):
    row = dataclasses.replace(
        ROWS[1], tokens_per_second=12_345.6, bandwidth=2.5e9, share_of_copying=0.25, peak_bytes=None
    )
    lines = case_text(dataclasses.replace(report, rows=[row]), "case", "", "N").splitlines()
    header, _, cells = (line.split(" | ") for line in lines if line.startswith("|"))
    told = dict(zip(header, cells, strict=True))
    assert (told["tokens/s"], told["GB/s"], told["of copying |"]) == ("12,346", "2.5", "25% |")


def test_every_line_of_a_table_has_as_many_cells(report):
    text = case_text(report, "case", "What it asks.", "N")
    for found in (part for part in text.split("\n\n") if part.startswith("|")):
        assert len({line.count("|") for line in found.splitlines()}) == 1


def test_a_bar_in_a_cell_ends_no_cell():
    text = table(["contender", "loss"], [["soft|max", "1"]])
    assert text.splitlines()[-1] == r"| soft\|max | 1 |"


def test_the_machine_and_its_limits_are_reported(report):
    text = markdown(report, {"case": ("What it asks.", "N")})
    assert "A processor, 2 cores, 8 GB of memory, AVX2, device cpu, 1 thread, load average 0.2" in text
    assert "- unrolled 0.1, torch 2.13; native kernels: avx2\n" in text
    assert "multiply-adds in registers 100.0 GFLOP/s; copying 20.0 GB/s" in text
    assert "quick" not in text
    quick = dataclasses.replace(report, settings=report.settings | {"quick": True})
    text = markdown(quick, {"case": ("What it asks.", "N")})
    assert "GB/s\n- quick: tiny sizes, one run each; the times have no meaning\n\n## case" in text
    limits = LIMITS | {"flops": None, "flops_missing": "no compiler was found"}
    text = markdown(dataclasses.replace(report, limits=limits), {"case": ("What it asks.", "N")})
    assert "multiply-adds in registers not measured: no compiler was found" in text


def test_a_busy_machine_is_reported(report):
    assert "other work" not in case_text(report, "case", "What it asks.", "N")
    busy = dataclasses.replace(ROWS[0], working=0.62)
    text = case_text(dataclasses.replace(report, rows=[busy, ROWS[1]]), "case", "What it asks.", "N")
    assert text.endswith("this process had 62% of the time at worst, so read the ratios only.")


def test_the_worst_share_of_the_time_is_told_and_only_of_a_cpu(report):
    both = [dataclasses.replace(row, working=x) for row, x in zip(ROWS[:2], (1.0, 0.62), strict=True)]
    text = case_text(dataclasses.replace(report, rows=both), "case", "What it asks.", "N")
    assert "this process had 62% of the time at worst" in text
    gpu = dataclasses.replace(report, rows=both, machine=MACHINE | {"device": "cuda"})
    assert "other work" not in case_text(gpu, "case", "What it asks.", "N")


def test_a_case_without_any_time_still_says_why(report):
    only = dataclasses.replace(report, rows=[ROWS[2]], remarks={})
    assert "| all | gone | missing: No module named 'gone' |" in case_text(only, "case", "It.", "N")


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_exponents_of_power_laws(power):
    sizes = [256 * 2**i for i in range(7)]
    assert exponent(sizes, [3e-6 * n**power for n in sizes]) == pytest.approx(power, abs=1e-9)


def test_what_a_call_costs_does_not_hide_the_exponent():
    sizes = [256 * 2**i for i in range(7)]
    assert exponent(sizes, [1e-3 + 1e-8 * n**2 for n in sizes]) == pytest.approx(2.0, abs=0.02)


@pytest.mark.parametrize(("order", "larger"), [([1, 2, 4, 8, 16], [4, 8, 16]), ([8, 2, 1, 4], [4, 8])])
def test_an_exponent_is_that_of_the_line_through_the_larger_half(order, larger):
    costs = {1: 5.0, 2: 5.5, 4: 7.0, 8: 30.0, 16: 40.0}
    expected = np.polyfit(np.log(larger), np.log([costs[n] for n in larger]), 1)[0]
    assert exponent(order, [costs[n] for n in order]) == pytest.approx(expected)


@pytest.mark.parametrize(("sizes", "costs"), [([256], [1.0]), ([256, 512], [0, 1.0])])
def test_an_exponent_needs_two_points_that_are_positive(sizes, costs):
    with pytest.raises(ValueError, match="but must be two or more that are positive"):
        exponent(sizes, costs)


def test_plots_name_contenders_with_their_exponents(report):
    figures = pytest.importorskip("unrolled.bench.figures")
    plots = pytest.importorskip("unrolled.bench.plots")
    drawn = {}

    def against_size(theme, title, axis, lines, tick, strong):
        drawn[title] = ([line.name for line in lines], strong)
        return original(theme, title, axis, lines, tick, strong)

    original = plots.against_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "against_size", against_size)
        patch.setattr(plots, "DPI", 40)
        assert figures.draw(report, "case", "batch") == {}
        rows = [
            dataclasses.replace(FAST, size=n, median=1e-6 * n**3, least=1e-6 * n, peak_bytes=n**2)
            for n in (256, 512, 1024)
        ]
        rows += [dataclasses.replace(row, contender="peer", ours=False, peak_bytes=None) for row in rows]
        found = figures.draw(dataclasses.replace(report, rows=rows), "case", "N")
    assert found.keys() == {"case-time.png", "case-memory.png"}
    assert all(image.startswith(b"\x89PNG") for image in found.values())
    assert drawn["case: time"] == (["ours: $N^{1.00}$", "peer: $N^{1.00}$"], {"ours: $N^{1.00}$"})
    assert drawn["case: peak memory"] == (["ours: $N^{2.00}$"], {"ours: $N^{2.00}$"})

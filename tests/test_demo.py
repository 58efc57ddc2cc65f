"""The demo, cut down to a few steps and short positions: a whole report, and nothing half-written."""

import gc
import importlib
import json
import math
import re
import shlex
import sys
from dataclasses import asdict
from functools import partial
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from commands import run, works
from typer.testing import Result

from unrolled.bench import measure, plots
from unrolled.bench.units import brief_time, duration, size
from unrolled.cli.run_config import read, resolve
from unrolled.decode import Plan
from unrolled.decode.memory import Layout
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.state import nbytes
from unrolled.training.memory import PeakBytes

demo_module = importlib.import_module("unrolled.cli.demo")  # `unrolled.cli.demo` itself is the command
SMALL = ["model.d_model=16", "model.n_layers=2", "model.n_heads=2"]
PICTURES = {"samples", "real", "completions", "loss", "time", "memory"}
SHAPE = {"vocab_size": 8, "d_model": 16, "n_layers": 2, "n_heads": 2, "positions": "sinusoidal"}


def run_demo(out: Path, *arguments: str) -> Result:
    settings = {"SAMPLES": 20, "SHAPE": SHAPE, "REPEATS": 2}
    settings |= {"POSITIONS": (4, 8, 16), "REREAD_POSITIONS": (4, 8), "COMPARED_AT": (4, 16)}
    settings["DIGITS"] = [*demo_module.DIGITS, *SMALL, "train.eval_every=5", "train.log_every=1"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setattr(demo_module, name, value)
        patch.setattr("unrolled.bench.plots.DPI", 40)
        return run("demo", "--out", out, "--steps", 10, *arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("runs") / "my demo"
    result = run_demo(out)
    assert result.exit_code == 0, result.output
    return out, result


@pytest.fixture(scope="module")
def figures(finished: tuple[Path, Result]) -> dict:
    return json.loads((finished[0] / "figures.json").read_text())


def jsonable(config: object) -> dict:
    return json.loads(json.dumps(asdict(config)))


class Page(HTMLParser):
    """Collects what the tests ask of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.sections: list[str] = []
        self.open: list[str] = []
        self.images: list[dict] = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.addresses += [values[name] for name in ("src", "srcset", "href") if name in values]
        if tag == "section":
            self.sections.append(values["id"])
        if tag == "img":
            self.images.append(values)
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.slow
def test_the_report_is_one_whole_page(finished):
    html = (finished[0] / "report.html").read_text()
    page = Page(html)
    assert page.open == []
    assert page.sections == ["samples", "completions", "training", "cost", "settings"]
    assert len(page.images) == len(PICTURES)
    assert all(image["alt"] for image in page.images)
    assert not re.search(r"\$\w", html)


def test_the_report_needs_no_other_file_and_no_network(finished):
    html = (finished[0] / "report.html").read_text()
    page = Page(html)
    assert len(page.addresses) == 2 * len(PICTURES)  # for light pages and for dark ones
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert len(set(page.addresses)) == len(page.addresses)
    assert "http" not in html
    assert "<script" not in html
    assert "url(" not in html


def test_the_settings_are_the_command_that_makes_them(finished, figures):
    html = (finished[0] / "report.html").read_text()
    text = unescape(re.search(r"<pre><code>(.*?)</code></pre>", html, re.DOTALL)[1])
    program, job, *overrides = shlex.split(text.replace("\\\n", ""))
    assert (program, job) == ("unrolled", "train")
    generating = unescape(re.search(r"<code>(unrolled generate .*?)</code>", html)[1])
    assert shlex.split(generating) == ["unrolled", "generate", str(finished[0]), "--out", "more.png"]
    run = resolve(read(None, overrides))
    assert jsonable(run.model) == figures["model"]["config"]
    assert jsonable(run.train) == figures["training"]["config"]
    assert "None" not in html


def test_the_columns_of_the_cost_table_say_what_they_hold(finished):
    html = (finished[0] / "report.html").read_text()
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", re.search(r"<thead>.*?</thead>", html, re.DOTALL)[0])
    time_and = ["time per token", "state", "time per token", "cache", "time per token", "activations"]
    assert heads == ["position", *plots.NAMES.values(), *time_and]


def test_text_and_pictures_have_one_width(finished):
    style = re.search(r"<style>.*?</style>", (finished[0] / "report.html").read_text(), re.DOTALL)[0]
    assert re.findall(r"max-width: ([^;]+);", style) == ["46rem"]


def test_the_folder_holds_the_pictures_and_a_run(finished):
    out, _ = finished
    for name in PICTURES:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    Decoder.load(out)
    works("generate", out, "--num-samples", 1, "--out", out / "one.png")
    assert not list(out.glob("*.tmp"))


def test_figures_are_complete_and_consistent(finished, figures):
    training, cost, seconds = figures["training"], figures["cost"], figures["seconds"]
    assert [step for step, _ in training["val"]] == [5, 10]
    assert len(training["train"]) == 10
    assert [training["best_step"], training["best_bits_per_dim"]] in training["val"]
    assert training["best_bits_per_dim"] == min(bits for _, bits in training["val"])
    assert training["uniform_bits_per_dim"] == math.log2(17)
    assert figures["model"]["parameters"] == sum(x.numel() for x in Decoder.load(finished[0]).parameters())
    assert sum(value for name, value in seconds.items() if name != "total") == pytest.approx(seconds["total"])
    positions = {name: [c["position"] for c in line] for name, line in cost["contenders"].items()}
    assert positions == {"linear": [4, 8, 16], "softmax_cache": [4, 8, 16], "softmax_recompute": [4, 8]}
    assert all(c["seconds"] > 0 for line in cost["contenders"].values() for c in line)


def test_the_page_and_the_summary_show_the_measured_figures(finished, figures):
    out, result = finished
    html = (out / "report.html").read_text()
    linear, cache = (figures["cost"]["contenders"][name] for name in ("linear", "softmax_cache"))
    printed = [f"{figures['training']['best_bits_per_dim']:.3f}"]
    printed += [brief_time(line[index]["seconds"]) for line in (linear, cache) for index in (0, -1)]
    printed += [size(line[index]["nbytes"]) for line in (linear, cache) for index in (0, -1)]
    for text in printed:
        assert text in html
        assert text in result.stdout
    assert str(out / "report.html") in result.stdout.replace("\n", "")


def test_running_it_again_does_not_train_again(finished, figures):
    out, _ = finished
    weights = (out / "model.safetensors").read_bytes()
    assert run_demo(out).exit_code == 0
    again = json.loads((out / "figures.json").read_text())
    assert (out / "model.safetensors").read_bytes() == weights
    assert again["training"] == figures["training"]
    assert again["samples"] == figures["samples"]


def test_fresh_trains_again(finished, figures):
    out, _ = finished
    assert "cannot be resumed" in run_demo(out, "--seed", "1").stderr
    assert run_demo(out, "--seed", "1", "--fresh").exit_code == 0
    again = json.loads((out / "figures.json").read_text())
    assert again["training"]["val"] != figures["training"]["val"]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["training", "drawing", "measuring", "building"])
def test_an_interrupt_leaves_no_report(when, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    name = {
        "training": "unrolled.training._steps.update",
        "drawing": "unrolled.cli._digits.draw",
        "measuring": "unrolled.bench.measure.cost_per_token",
        "building": "unrolled.cli._demo_report.build",
    }[when]
    monkeypatch.setattr(name, interrupt)
    assert run_demo(tmp_path).exit_code == 130
    assert not list(tmp_path.glob("*.png"))
    assert not (tmp_path / "figures.json").exists()
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("package", ["matplotlib", "sklearn"])
def test_a_missing_package_is_named_before_any_work(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    result = run_demo(tmp_path / "out")
    assert result.exit_code == 2
    message = f"error: the demo needs {package}, which is missing: run pip install '.[demo]' in a clone"
    assert result.stderr == f"{message} of unrolled\n"
    assert not (tmp_path / "out").exists()


def test_bytes_of_a_step_are_those_of_the_state():
    costs = measure.linear_and_softmax(SHAPE, (3, 30), recompute_positions=(3, 30), repeats=1)
    assert [c.position for c in costs["linear"]] == [3, 30]
    for name, attention in (("linear", "linear"), ("softmax_cache", "softmax")):
        model = measure.planned(Decoder(DecoderConfig(attention=attention, **SHAPE)))
        for cost in costs[name]:
            _, state = model.prefill(torch.zeros(1, cost.position, dtype=torch.long), model.init_state(1))
            assert cost.nbytes == nbytes(state)
    assert costs["linear"][0].nbytes == costs["linear"][1].nbytes
    assert costs["softmax_cache"][0].nbytes < costs["softmax_cache"][1].nbytes
    assert costs["softmax_recompute"][0].nbytes < costs["softmax_recompute"][1].nbytes


@pytest.mark.parametrize("attention", ["linear", "softmax", "window"])
def test_a_plan_that_reads_again_reads_the_same_and_copies_no_cache(attention, monkeypatch):
    model = Decoder(DecoderConfig(attention=attention, **SHAPE)).eval()
    runner = measure.planned(model)
    with torch.inference_mode():
        task = measure.stepping(model)(30)
        expected, _ = runner.prefill(measure.random_tokens(model, 30 + task.tokens), runner.init_state(1))
        if isinstance(runner, Plan):
            monkeypatch.setattr(Layout, "_resized", None)
        first, second = task.run(), task.run()
    torch.testing.assert_close(first, expected[:, -1])
    assert torch.equal(first, second)


def test_contenders_take_turns_and_the_median_is_reported(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    order = []
    durations = {"a": iter([100.0, 4.0, 6.0]), "b": iter([2.0, 2.0, 50.0])}

    def contender(name: str) -> measure.Contender:
        def prepare(position: int) -> measure.Task:
            def run() -> None:
                order.append(name)
                clock[0] += next(durations[name])

            return measure.Task(run, tokens=2, nbytes=position)

        return prepare

    before = torch.get_num_threads()
    costs = measure.cost_per_token({"a": (contender("a"), [7]), "b": (contender("b"), [9])}, repeats=3)
    assert "".join(order) == "ababab"
    assert costs == {"a": [measure.Cost(7, 3.0, 7)], "b": [measure.Cost(9, 1.0, 9)]}
    assert torch.get_num_threads() == before


def test_the_budget_is_shared_equally_by_what_is_timed(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])

    def passing(seconds: float) -> None:
        clock[0] += seconds

    runs = {
        name: partial(passing, seconds) for name, seconds in (("short", 1.0), ("long", 2.0), ("huge", 99))
    }
    found = measure.take_turns(runs, least=1, budget=21)
    assert found == {"short": [1.0] * 6, "long": [2.0] * 3, "huge": [99.0]}  # in 7 s each


def test_no_garbage_is_collected_while_a_clock_runs():
    before, collecting = gc.isenabled(), []
    measure.take_turns({"a": lambda: collecting.append(gc.isenabled())}, least=2, budget=0)
    assert collecting == [False, False]
    assert gc.isenabled() == before


def test_peak_bytes_counts_what_is_alive_at_once():
    x = torch.zeros(1000)  # 4,000 bytes, made outside
    with torch.inference_mode(), PeakBytes() as memory:
        y = x + 1
        z = y.view(10, 100)[:5]  # the same memory
        w = x.add(2).mul(3)  # the sum and the product at once, beside y
        del y, z, w
        assert memory.live == 0
        x.neg()
    assert memory.peak == 12_000


@pytest.mark.parametrize(
    ("write", "quantity", "text"),
    [
        (brief_time, 0.00123456, "1.23 ms"),
        (brief_time, 0.1, "100 ms"),
        (brief_time, 0.9996, "1 s"),
        (brief_time, 1.5, "1.5 s"),
        (brief_time, 999.4, "999 s"),
        (brief_time, 1234.4, "1,234 s"),
        (size, 512, "512 bytes"),
        (size, 34_856, "34.9 kB"),
        (size, 999_999, "1 MB"),
        (size, 16_400_040, "16.4 MB"),
        (duration, 3.21, "3.2 s"),
        (duration, 42.4, "42 s"),
        (duration, 59.6, "1 min 0 s"),
        (duration, 125, "2 min 5 s"),
    ],
)
def test_quantities(write, quantity, text):
    assert write(quantity) == text

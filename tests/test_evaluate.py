"""`unrolled evaluate` of tasks other than translation: loss, accuracy, and both by position."""

import json
import math
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from commands import error, works
from planned import rounds_inputs_to_bf16
from torch import nn

from unrolled import data, models
from unrolled.cli import _device
from unrolled.cli._planned import Planned
from unrolled.cli._scores import count_right, doubling, in_windows, right_bits, right_labels
from unrolled.cli.run_config import read_saved, resolve
from unrolled.contract import IGNORED
from unrolled.data import Batch
from unrolled.decode import plan
from unrolled.decode.packing import rounded
from unrolled.ops import native

MODEL = ["model.d_model=16", "model.n_layers=1", "model.n_heads=2"]
TRAIN = ["train.steps=2", "train.batch_size=8", "train.eval_every=2", "train.eval_batches=1"]

needs_kernels = pytest.mark.skipif(not native.available(), reason="plans need the C++ kernels")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on text, and one on selective copying with learned positions."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("".join(f"{i} green bottles hanging on the wall.\n" for i in range(130)))
    text = ["data.name=text", f"data.path={folder / 'text.txt'}", "data.length=32", "model.positions=rotary"]
    works("train", *text, *MODEL, *TRAIN, f"run_dir={folder / 'text'}")
    tasks = ["data.name=selective_copy", "data.length=16", "data.n_tokens=3", "data.val_size=20"]
    works("train", *tasks, *MODEL, *TRAIN, f"run_dir={folder / 'tasks'}")
    return folder


def test_it_evaluates_the_whole_split_and_counts_the_correct_tokens(runs: Path) -> None:
    printed = works("evaluate", runs / "tasks").stdout
    nats, bits = (float(x) for x in re.search(r"loss ([\d.]+) nats/token, ([\d.]+) bits", printed).groups())
    assert bits == pytest.approx(nats / math.log(2), rel=1e-3)
    run = resolve(read_saved(runs / "tasks"))
    assert run.train.eval_batches == 1  # in training
    model = models.load(runs / "tasks").eval()
    (batch,) = run.dataset.eval_batches(20)
    assert nats == pytest.approx(model.loss(*batch[:2]).item(), abs=1e-4)
    right = (model(batch.inputs).argmax(-1) == batch.targets).sum().item()
    assert "over all 60 targets in 20 windows of 16 tokens" in printed
    assert f"validation split: {right} of 60 correct" in printed


@needs_kernels
def test_weights_are_rounded_first(runs: Path, tmp_path: Path) -> None:
    folder, file = Path(shutil.copytree(runs / "text", tmp_path / "run")), tmp_path / "figures.json"
    model = models.load(folder).eval()
    with torch.no_grad():
        for x in model.parameters():
            nn.init.normal_(x, std=0.5)
    model.save(folder)
    settings = (folder / "run.yaml").read_text()
    (folder / "run.yaml").write_text(settings.replace("bf16: true", "bf16: false"))  # a plan computes in fp32
    arguments = ["evaluate", folder, "--length", 40, "--positions", "--out", file, "--force"]
    losses = {}
    for weights in (None, "fp32", "bf16", "int8", "int4"):
        works(*arguments, *(() if weights is None else ("--weights", weights)))
        figures = json.loads(file.read_text())
        losses[weights] = figures["loss"]
        assert figures.get("weights") == weights
        assert len(figures["positions"]) > 3
    assert losses["fp32"] == pytest.approx(losses[None], abs=1e-5)
    settings = (folder / "run.yaml").read_text()
    assert "segment: null" in settings
    (folder / "run.yaml").write_text(settings.replace("segment: null", "segment: 16"))
    works(*arguments, "--weights", "fp32")
    assert json.loads(file.read_text())["loss"] == pytest.approx(losses["fp32"], abs=1e-5)
    for matrix in model.modules():
        if isinstance(matrix, nn.Linear | nn.Embedding):
            matrix.weight.data = rounded(matrix.weight, "bf16")
    model.save(folder)
    works(*arguments)
    tolerance = 2e-3 if rounds_inputs_to_bf16() else 1e-5
    assert losses["bf16"] == pytest.approx(json.loads(file.read_text())["loss"], abs=tolerance)
    assert 2e-5 < abs(losses["bf16"] - losses["fp32"]) < abs(losses["int4"] - losses["fp32"])
    assert abs(losses["int8"] - losses["fp32"]) < 0.02


@needs_kernels
def test_weights_of_other_models_and_devices_are_refused(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ["data.name=text", f"data.path={runs / 'text.txt'}", "data.length=32"]
    works("train", *text, *MODEL[:2], "model.name=recurrent_lm", *TRAIN, f"run_dir={tmp_path}")
    for command in ("evaluate", "generate"):
        assert error(command, tmp_path, "--weights", "int8") == "a plan cannot run RecurrentLM"
        printed = error(command, runs / "text", "--weights", "int8", "--device", "cpux")
        assert printed.startswith("--device is cpux, but must be a device of torch")
    works("evaluate", runs / "text", "--weights", "int8", "--device", "cpu:0")
    monkeypatch.setattr(_device, "choose", lambda name: torch.device("meta"))  # stands for another device
    for command in ("evaluate", "generate"):
        printed = error(command, runs / "text", "--weights", "int8", "--device", "cuda")
        assert printed == "--device is cuda, but int8 weights run on the CPU"


def test_positions_beyond_the_length_of_training_and_the_figures_as_json(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ["evaluate", runs / "text", "--positions", "--length", 100, "--out", file]
    printed = works(*arguments).stdout
    figures = json.loads(file.read_text())
    total, *parts = figures["positions"]
    assert [(x["start"], x["stop"]) for x in [total, *parts]] == [
        (0, 100), (0, 8), (8, 16), (16, 32), (32, 64), (64, 100)
    ]  # fmt: skip
    dataset = resolve(read_saved(runs / "text")).dataset
    assert total["targets"] == len(dataset._ids["val"]) - 1
    assert sum(x["targets"] for x in parts) == total["targets"]
    assert sum(x["loss"] * x["targets"] for x in parts) == pytest.approx(total["loss"] * total["targets"])
    assert figures["loss"] == total["loss"]
    assert figures["splits"] == {"validation": [total["correct"], total["targets"]]}
    assert (figures["unit"], figures["data"]["name"], figures["data"]["length"]) == (
        "nats/token",
        "text",
        100,
    )
    rows = re.findall(r"\| (\d+) to (\d+) \| ([\d,]+) \| ([\d.]+) \| ± ([\d.]+) \|", printed)
    assert [(int(a), int(b)) for a, b, *_ in rows] == [(x["start"], x["stop"]) for x in [*parts, total]]
    assert [float(row[3]) for row in rows] == [pytest.approx(x["loss"], abs=1e-4) for x in [*parts, total]]
    works(*arguments)  # its own file may be replaced
    file.write_text("{}")
    assert "is not from this command" in error(*arguments)


def test_a_single_range_is_shown_once(runs: Path) -> None:
    printed = works("evaluate", runs / "text", "--positions", "--length", 8).stdout
    assert printed.count("0 to 8") == 1


@pytest.mark.parametrize("length", [*range(1, 70), 128, 511, 512, 784, 1000, 4096])
def test_ranges_double_and_cover_all_positions_once(length: int) -> None:
    ranges = doubling(length)
    assert [t for start, stop in ranges for t in range(start, stop)] == list(range(length))
    stops = [stop for _, stop in ranges]
    assert all(b == 2 * a for a, b in pairwise(stops[:-1]))
    assert len(ranges) <= 5 + max(0, length.bit_length() - 9)
    assert ranges[0][1] <= 64


def test_it_says_when_a_model_cannot_be_evaluated_so(runs: Path) -> None:
    said = error("evaluate", runs / "tasks", "--length", 17)
    assert "--length is 17, but must be at most 16" in said
    assert "model.positions=rotary" in said
    assert (
        "over all 60 targets in 20 windows of 12" in works("evaluate", runs / "tasks", "--length", 12).stdout
    )
    assert "length is 0, but must be" in error("evaluate", runs / "text", "--length", 0)
    assert "length is 5, but must be at least 2 n_tokens = 6" in error(
        "evaluate", runs / "tasks", "--length", 5
    )
    assert "--split is for translations" in error("evaluate", runs / "text", "--split", "val")
    assert "has no run.yaml" in error("evaluate", runs)


def test_bits_per_byte_are_of_the_targets_that_the_loss_covers(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(("latin words " + "λόγος ἦν ἀρχή") * 200)
    folder, half = tmp_path / "run", ["model.name=perceiver_ar", "model.n_latents=16", "data.length=32"]
    text = ["data.name=text", f"data.path={tmp_path / 'text.txt'}"]
    works("train", *text, *half, *MODEL, *TRAIN, f"run_dir={folder}")
    works("evaluate", folder, "--out", tmp_path / "figures.json")
    figures, run, size = json.loads((tmp_path / "figures.json").read_text()), resolve(read_saved(folder)), 0
    for batch in run.dataset.eval_batches(64):
        for row in batch.targets[:, -16:]:
            size += len(run.dataset.vocabulary.decode(row[row != IGNORED]).encode())
    nats = figures["loss"] * figures["splits"]["validation"][1]
    assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / size)


def test_data_of_one_length_has_no_other(runs: Path) -> None:
    config = models.load(runs / "text").config
    with pytest.raises(
        ValueError, match="--length is for data with an option length, which copy_bits does not"
    ):
        in_windows(data.load("copy_bits", val_size=1), config, 5)


def test_bits_are_counted_too(tmp_path: Path) -> None:
    bits = ["data.name=copy_bits", "data.max_length=3", "data.val_size=10", "model.hidden_size=8"]
    works("train", *bits, *TRAIN, f"run_dir={tmp_path / 'run'}")
    printed = works("evaluate", tmp_path / "run", "--out", tmp_path / "figures.json").stdout
    run, model = resolve(read_saved(tmp_path / "run")), models.load(tmp_path / "run").eval()
    (batch,) = run.dataset.eval_batches(10)
    count = int((batch.targets != IGNORED).sum())
    wrong = int(model.wrong_bits(batch.inputs, batch.targets).sum())
    assert f"validation split: {count - wrong} of {count} correct" in printed
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["splits"] == {"validation": [count - wrong, count]}
    assert figures["loss"] == pytest.approx(model.loss(*batch[:2]).item(), rel=1e-6)
    for option in (("--length", 9), ("--weights", "int8")):
        assert f"{option[0]} is for predicting tokens" in error("evaluate", tmp_path / "run", *option)


def test_what_counts_as_correct() -> None:
    batches = [
        Batch(torch.tensor([[2, 0], [1, 0]]), torch.tensor([2, 0]), torch.tensor([[False, True]] * 2)),
        Batch(torch.tensor([[1, 1]]), torch.tensor([1]), torch.tensor([[False, False]])),
    ]

    def says_the_first(inputs: torch.Tensor, *, key_padding_mask: torch.Tensor) -> torch.Tensor:
        assert key_padding_mask.shape == inputs.shape
        return torch.nn.functional.one_hot(inputs[:, 0], 3).float()

    assert count_right(says_the_first, batches, torch.device("cpu"), right_labels) == (2, 3)
    logits, targets = torch.tensor([[2.0, -1, 5], [-3, -4, 1]]), torch.tensor([[1.0, 1, -100], [0, -100, 1]])
    assert right_bits(logits, targets).tolist() == [True, False, True, True]


def test_windows_may_be_as_long_as_the_model_has_positions() -> None:
    config = models.DecoderConfig(vocab_size=4, max_length=16)
    dataset = data.load("selective_copy", length=8, n_tokens=2, val_size=1)
    assert in_windows(dataset, config, 16).longest == 16
    with pytest.raises(ValueError, match="--length is 17, but must be at most 16"):
        in_windows(dataset, config, 17)


def test_losses_of_tasks_on_bits_are_told_in_bits_too(tmp_path: Path) -> None:
    bits = ["data.name=copy_bits", "data.max_length=3", "data.val_size=4", "model.hidden_size=8"]
    works("train", *bits, *TRAIN, f"run_dir={tmp_path / 'run'}")
    printed = works("evaluate", tmp_path / "run").stdout
    nats, told = (float(x) for x in re.search(r"loss ([\d.]+) nats/bit, ([\d.]+) bits\n", printed).groups())
    assert told == pytest.approx(nats / math.log(2), abs=2e-4)


def test_only_tokens_of_a_tokenizer_have_a_perplexity(runs: Path, tmp_path: Path) -> None:
    assert "perplexity" not in works("evaluate", runs / "text", "--out", tmp_path / "figures.json").stdout
    assert "perplexity" not in json.loads((tmp_path / "figures.json").read_text())


def test_answers_are_judged_without_dropout(tmp_path: Path) -> None:
    listops = ["data.name=listops", "data.shortest=3", "data.length=12", "data.depth=3", "data.val_size=200"]
    sizes = ["model.d_model=8", "model.n_layers=1", "model.n_heads=2", "model.dropout=0.9"]
    works("train", *listops, *sizes, *TRAIN, f"run_dir={tmp_path / 'run'}")
    works("evaluate", tmp_path / "run", "--out", tmp_path / "figures.json")
    run, model = resolve(read_saved(tmp_path / "run")), models.load(tmp_path / "run").eval()
    (batch,) = run.dataset.eval_batches(200)
    right = right_labels(model(batch.inputs, key_padding_mask=batch.key_padding_mask), batch.targets)
    splits = json.loads((tmp_path / "figures.json").read_text())["splits"]
    assert splits == {"validation": [int(right.sum()), 200]}


@needs_kernels
@torch.no_grad()
def test_a_plan_reads_packed_sequences_apart() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "n_layers": 1, "n_heads": 2, "positions": "rotary"}
    model = models.Decoder(models.DecoderConfig(7, **sizes)).eval()
    tokens, bounds = torch.randint(7, (1, 9)), torch.tensor([0, 4, 9], dtype=torch.int32)
    found = Planned(model, plan(model, "fp32"))(tokens, cu_seqlens=bounds)
    torch.testing.assert_close(found, model(tokens, cu_seqlens=bounds), rtol=0, atol=1e-5)

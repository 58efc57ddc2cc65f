"""`unrolled quantize`: packed weights in a folder, and what they cost in quality."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import error, run, works
from torch import nn

from unrolled import data, models, training
from unrolled.cli import _device, run_config
from unrolled.cli.quantize import SAMPLE, _sample
from unrolled.data import Vocabulary
from unrolled.decode import load, plan
from unrolled.folders import PLAN_FILE, WEIGHTS_FILE
from unrolled.models import Encoder, EncoderConfig
from unrolled.ops import native
from unrolled.training import TrainConfig

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights are large enough that rounding them changes the loss."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("".join(f"{i} green bottles hanging on the wall.\n" for i in range(130)))
    words = ["data.name=text", f"data.path={folder / 'text.txt'}", "data.length=32", "train.steps=1"]
    words += ["model.d_model=64", "model.n_layers=1", "model.n_heads=2", "model.attention=linear"]
    words += ["model.attention_options.linear={conv: 4, rotary: false}", "train.batch_size=4"]
    works("train", *words, "train.bf16=true", f"run_dir={folder / 'book'}")
    model = models.load(folder / "book")
    torch.manual_seed(0)
    for x in model.parameters():
        nn.init.normal_(x, std=0.3)
    model.save(folder / "book")
    return folder / "book"


def test_it_writes_a_plan_and_prints_what_it_costs(trained: Path) -> None:
    out, sizes = trained.with_name("book-int4"), {}
    printed = works("quantize", trained, "--weights", "int4").stdout
    for folder, name in ((trained, "model.safetensors"), (out, PLAN_FILE)):
        sizes[folder] = (folder / name).stat().st_size
    assert f"{out}: {sizes[out]:,} bytes with int4 weights" in printed
    assert f"of the {sizes[trained]:,} before" in printed
    before, after, change = map(float, re.search(
        r"loss ([\d.]+) nats/token in fp32, ([\d.]+) in int4: ([-+.\d]+), over all \d+ targets", printed
    ).groups())  # fmt: skip
    assert change == pytest.approx(after - before, abs=1.01e-4)
    assert abs(change) > 1e-3
    assert (
        f"validation loss {before:.4f} nats/token" in works("evaluate", trained, "--weights", "fp32").stdout
    )
    found = float(re.search(r"loss ([\d.]+) nats/token", works("evaluate", out).stdout)[1])
    assert found == pytest.approx(after, abs=2e-3)  # inputs are not rounded
    assert load(out).weights == "int4"
    assert {x.name for x in out.iterdir()} == {"config.json", "run.yaml", "vocabulary.json", PLAN_FILE}
    assert (out / "run.yaml").read_bytes() == (trained / "run.yaml").read_bytes()


def test_no_loss_is_not_negative(monkeypatch: pytest.MonkeyPatch, trained: Path, tmp_path: Path) -> None:
    losses = iter([1.000001, 1.0])
    monkeypatch.setattr(
        training, "evaluate_positions", lambda *_: [SimpleNamespace(loss=next(losses), targets=7)]
    )
    assert "in int8: +0.0000, over" in works("quantize", trained, "--out", tmp_path / "out").stdout


def test_the_folder_generates_what_the_plan_does(trained: Path, tmp_path: Path) -> None:
    words = ["--prompt", "9 green", "--tokens", 40, "--seed", 3]
    works("quantize", trained, "--out", tmp_path / "out")
    output = works("generate", tmp_path / "out", *words).stdout
    [drawn] = plan(models.load(trained), "int8").generate(
        [Vocabulary.load(trained).encode("9 green")], 40, seed=3
    )
    assert output == f"9 green{Vocabulary.load(trained).decode(drawn)}\n"
    assert output == works("generate", tmp_path / "out", *words, "--weights", "int8").stdout
    assert output == works("generate", trained, *words, "--weights", "int8").stdout


def test_a_chat_template_comes_along(trained: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(trained, tmp_path / "book"))
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    works("quantize", copy)
    assert (tmp_path / "book-int8/chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_images(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    size = {"d_model": 8, "n_layers": 1, "n_heads": 2}
    config = models.DecoderConfig(4, max_length=16, start_token=True, inputs="pixels", **size)
    Vocabulary("image", shape=[4, 4]).attach(models.Decoder(config)).save(tmp_path / "images")
    result = works("quantize", tmp_path / "images", "--weights", "bf16")
    assert "the loss was not measured: " in result.stderr
    assert "is not a run folder of unrolled train" in result.stderr
    works("generate", tmp_path / "images-bf16", "--num-samples", 2, "--out", tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")


def test_data_that_is_gone_costs_the_measurement_only(trained: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(trained, tmp_path / "book"))
    settings = (copy / "run.yaml").read_text()
    (copy / "run.yaml").write_text(settings.replace("text.txt", "gone.txt"))
    result = works("quantize", copy)
    assert "the loss was not measured: " in result.stderr
    assert "gone.txt" in result.stderr
    assert load(tmp_path / "book-int8").weights == "int8"


def test_a_missing_library_of_the_data_costs_the_measurement_only(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise ImportError("the data set needs scikit-learn")

    shutil.copytree(trained, tmp_path / "book")
    monkeypatch.setattr(run_config, "reopen", missing)
    monkeypatch.chdir(tmp_path)
    result = works("quantize", "book")
    assert result.stdout.startswith("book-int8: ")
    assert "the loss was not measured: the data set needs scikit-learn" in result.stderr
    assert load(tmp_path / "book-int8").weights == "int8"


def test_the_folder_is_a_model_too(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "book-int8"
    after = re.search(r"([\d.]+) in int8", works("quantize", trained, "--out", out).stdout)[1]
    settings = (out / "run.yaml").read_text()
    (out / "run.yaml").write_text(settings.replace("bf16: true", "bf16: false"))
    for words in ([], ["--weights", "int8"]):
        printed = works("evaluate", out, *words).stdout
        found = re.search(r"loss ([\d.]+) nats/token", printed)[1]
        assert float(found) == pytest.approx(float(after), abs=2e-4), words
    assert "run_dir: " in works("info", out).stdout
    monkeypatch.setattr(native, "missing", lambda: "there is no compiler")
    assert works("generate", out, "--prompt", "9 green", "--tokens", 8).stdout.startswith("9 green")


def test_refusals(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Encoder(EncoderConfig(vocab_size=5, d_model=8, n_heads=2, n_classes=3)).save(tmp_path / "encoder")
    assert "which does not predict tokens" in error("quantize", tmp_path / "encoder")
    options = {"attention": "aft", "positions": "none"}
    config = models.DecoderConfig(9, d_model=8, n_layers=1, n_heads=2, **options)
    models.Decoder(config).save(tmp_path / "aft")
    assert error("quantize", tmp_path / "aft") == "a plan cannot run aft attention"
    assert not (tmp_path / "aft-int8").exists()
    printed = error("quantize", trained, "--out", trained, "--force")
    assert printed == f"{trained} is the model's own folder, but must be another one"
    out = tmp_path / "out"
    works("quantize", trained, "--out", out)
    assert "holds packed weights, in plan.safetensors, but must hold" in error("quantize", out)
    for words in (["generate", out, "--prompt", "9"], ["evaluate", out]):
        assert error(*words, "--weights", "int4") == f"--weights is int4, but {out} holds weights in int8"
    assert "but must be empty or hold a run" in error("train", "data.name=copy", f"run_dir={out}")
    monkeypatch.setattr(_device, "choose", lambda name: torch.device("meta"))  # stands for another device
    printed = error("generate", tmp_path / "out", "--device", "cuda", "--prompt", "9")
    assert printed == "--device is cuda, but int8 weights run on the CPU"
    assert run("quantize", trained, "--weights", "int2").exit_code == 2


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("config.json", "is not a model's folder: it has no config.json"),
        ("vocabulary.json", "is not a run of unrolled train: it has no vocabulary.json"),
        (PLAN_FILE, f"has neither {WEIGHTS_FILE} nor {PLAN_FILE}"),
    ],
)
def test_a_file_that_the_folder_lacks_is_named(
    trained: Path, tmp_path: Path, lost: str, message: str
) -> None:
    out = tmp_path / "out"
    works("quantize", trained, "--out", out)
    (out / lost).unlink()
    assert error("generate", out) == f"{out} {message}"


def test_the_folder_holds_one_model_whatever_it_held_before(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "other"
    shutil.copytree(trained, out)
    works("quantize", trained, "--out", out, "--force")
    assert {x.name for x in out.iterdir() if not x.name.startswith(".")} >= {PLAN_FILE}
    assert not (out / WEIGHTS_FILE).exists()
    works("train", "--config", trained / "run.yaml", f"run_dir={out}", "--fresh")
    assert (out / WEIGHTS_FILE).exists()
    assert not (out / PLAN_FILE).exists()


def test_a_text_that_is_read_in_order_has_a_sample_too(trained: Path, tmp_path: Path) -> None:
    settings = [f"--config={trained / 'run.yaml'}", "data.order=consecutive", f"run_dir={tmp_path / 'run'}"]
    works("train", *settings)
    works("quantize", tmp_path / "run", "--weights", "int4")


def test_the_sample_of_int4_has_different_batches() -> None:
    run = SimpleNamespace(dataset=data.load("copy", length=64, val_size=1), train=TrainConfig(batch_size=8))
    found = _sample(run)
    assert found.numel() >= SAMPLE
    assert len(found.unique(dim=0)) == len(found)

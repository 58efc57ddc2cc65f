"""Training on speech, transcribing and counting errors, from the command line."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import error, run, works
from sounds import spoken, tone, write_an4, write_digits, write_wave

from unrolled import data, generation, models
from unrolled.cli import run_config
from unrolled.cli._error_rate import error_rate
from unrolled.cli.recipes import RECIPES
from unrolled.contract import IGNORED
from unrolled.data import Vocabulary

jiwer = pytest.importorskip("jiwer")
for library in ("soundfile", "soxr", "kaldi_native_fbank", "transformers"):
    pytest.importorskip(library)

SMALL = ["model.d_model=16", "model.n_layers=1", "train.batch_size=6", "train.eval_every=20"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        root = tmp_path_factory.mktemp("data")
        write_digits(root, monkeypatch)
        yield write_an4(root, monkeypatch)


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "an4"
    settings = ["data.name=an4", f"data.data_dir={folder}", "data.masks=0", f"run_dir={run_dir}"]
    learns = ["train.steps=300", "train.lr=5e-3", "train.warmup_steps=10", "train.bf16=false"]
    ended = works(
        "train", *settings, *SMALL, *learns, "model.d_model=32", "model.n_layers=2", "model.dropout=0.0"
    )
    assert re.search(r"best validation loss \d+\.\d+ nats/symbol", ended.stderr)
    assert f"transcribe with it: unrolled transcribe {run_dir} sound.wav" in ended.stderr
    return run_dir


@pytest.mark.slow
def test_a_run_is_that_of_a_transcriber_by_its_recipe(trained: Path) -> None:
    assert isinstance(models.load(trained), models.Transcriber)
    settings = run_config.read_saved(trained)
    assert settings["train"]["optimizer"] == RECIPES["speech"]["train"]["optimizer"]
    assert settings["model"]["attention"] == RECIPES["speech"]["model"]["attention"]
    assert "best loss" in works("info", trained).stdout


@pytest.mark.slow
def test_what_was_learned_is_transcribed_in_a_line_for_each_file(trained: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(trained, tmp_path / "run"))
    (alone / "run.yaml").unlink()  # the folder of the model is enough
    said = {"no": "N OW", "oh": "OW", "two": "T UW"}
    files = [write_wave(tmp_path / f"{word}.wav", [spoken(word.upper(), 16_000)]) for word in said]
    printed = works("transcribe", alone, *files).stdout.splitlines()
    assert len(printed) == 3
    vocabulary, model = Vocabulary.load(alone), models.load(alone)
    sounds = [vocabulary.features(file) for file in files]
    for beam in (1, 8):
        expected = [vocabulary.decode(x) for x in generation.transcribe(model, sounds, beam_size=beam)]
        assert works("transcribe", alone, *files, "--beam-size", beam).stdout.splitlines() == expected
    assert printed[0] == "N OW"
    stereo = write_wave(tmp_path / "stereo.wav", [spoken("NO", 44_100)] * 2, 44_100)
    assert works("transcribe", alone, stereo).stdout.splitlines() == printed[:1]


def test_errors_are_those_of_jiwer_with_a_standard_error(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    printed = works("evaluate", trained, "--beam-size", 4, "--out", file).stdout
    figures = json.loads(file.read_text())
    found = figures["errors"]
    run = run_config.resolve(run_config.read_saved(trained))
    model, vocabulary = models.load(trained).eval(), run.dataset.vocabulary
    (batch,) = run.dataset.eval_batches(6)
    rows = [x[~pad] for x, pad in zip(batch.inputs, batch.key_padding_mask, strict=True)]
    heard = [vocabulary.decode(ids) for ids in generation.transcribe(model, rows, beam_size=4)]
    said = [vocabulary.decode(ids[ids != IGNORED]) for ids in batch.targets]
    assert found["rate"] == pytest.approx(jiwer.wer(said, heard))
    assert (found["units"], found["utterances"], found["beam_size"]) == (7, 2, 4)
    assert figures["loss"] == pytest.approx(
        model.loss(batch.inputs, batch.targets, key_padding_mask=batch.key_padding_mask).item(), rel=1e-5
    )
    assert f"phone error rate {found['rate']:.2%} ± {found['standard_error']:.2%}" in printed
    assert f"({found['errors']} errors in 7 phones of 2 utterances, beam 4)" in printed


def test_the_standard_error_is_that_of_a_ratio(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"name": "spoken_digits", "data_dir": str(folder), "val_size": 40, "most": 4}
    dataset = run_config.resolve({"data": settings}).dataset
    monkeypatch.setattr(
        generation, "transcribe", lambda model, rows, beam_size: [torch.tensor([1, 2])] * len(rows)
    )
    found = error_rate(None, dataset, 8, 1)
    pairs = []
    for batch in dataset.eval_batches(8):
        for ids in batch.targets:
            words = dataset.vocabulary.decode(ids[ids != IGNORED])
            pairs.append((jiwer.wer(words, "one two") * len(words.split()), len(words.split())))
    wrong, count = torch.tensor(pairs).double().T
    assert found.unit == "word"
    assert found.rate == pytest.approx(float(wrong.sum() / count.sum()))
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(40, (20_000, 40), generator=generator)
    bootstrap = (wrong[draws].sum(1) / count[draws].sum(1)).std().item()
    assert found.standard_error == pytest.approx(bootstrap, rel=0.1)


@pytest.mark.parametrize("name", ["transcriber", "bilstm_transcriber"])
def test_digits_train_each_kind(name: str, folder: Path, tmp_path: Path) -> None:
    settings = ["data.name=spoken_digits", f"data.data_dir={folder}", "data.most=2", "data.val_size=4"]
    steps = ["train.steps=2", "train.optimizer=adamw", f"model.name={name}"]
    works("train", *settings, *SMALL, *steps, f"run_dir={tmp_path / 'run'}")
    printed = works("evaluate", tmp_path / "run").stdout
    assert re.search(r"word error rate \d+\.\d+% ± ", printed)
    assert not math.isnan(float(re.search(r"loss ([\d.]+) nats/symbol", printed)[1]))
    saved = run_config.read_saved(tmp_path / "run")
    assert saved["model"]["name"] == name


def test_wrong_sounds_are_named(trained: Path, tmp_path: Path) -> None:
    good = write_wave(tmp_path / "good.wav", [tone(300, 0.3)])
    bad = tmp_path / "bad.wav"
    bad.write_text("no sound")
    assert error("transcribe", trained, good, tmp_path / "none.wav").endswith(
        "none.wav is not a file, but must be a sound"
    )
    assert "bad.wav cannot be read as a sound: " in error("transcribe", trained, bad)
    empty = write_wave(tmp_path / "empty.wav", [tone(300, 0.0)])
    assert "empty.wav has 0 samples at 16000 Hz, but must have at least 400" in error(
        "transcribe", trained, empty
    )
    for words in (["transcribe", trained, good], ["evaluate", trained]):
        result = run(*words, "--beam-size", 0)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--beam-size" in result.stderr


def test_other_folders_and_tasks_are_named(trained: Path, tmp_path: Path) -> None:
    good = write_wave(tmp_path / "good.wav", [tone(300, 0.3)])
    assert "is not a model's folder" in error("transcribe", tmp_path, good)
    small = [
        "data.length=4",
        "data.val_size=4",
        "train.steps=1",
        "model.d_model=8",
        "model.n_layers=1",
        "model.n_heads=1",
    ]
    works("train", "data.name=copy", *small, f"run_dir={tmp_path / 'copy'}")
    assert error("transcribe", tmp_path / "copy", good) == (
        f"{tmp_path / 'copy'} holds a model of the kind 'decoder', which does not transcribe; the kind must be one of transcriber, bilstm_transcriber"
    )
    assert "--beam-size is for translations and speech" in error(
        "evaluate", tmp_path / "copy", "--beam-size", 2
    )
    assert "--split is for translations" in error("evaluate", trained, "--split", "test")
    assert "which does not predict tokens" in error("generate", trained)
    recipe = ["train", "data.name=copy", "model.recipe=speech"]
    assert (
        error(*recipe)
        == "model.recipe is 'speech', but must be one of classic, rwkv-lm, small-lm, best-lm, pixels for the model decoder"
    )


@pytest.mark.slow
def test_an_exported_run_transcribes_the_same(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    out, words = tmp_path / "speech.onnx", {"NO": 16_000, "TWO": 16_000, "ENTER": 44_100}
    assert works("export", trained, out).stdout.startswith(f"{out / 'plain.onnx'}: ")
    files = [
        write_wave(tmp_path / f"{word}.wav", [spoken(word, rate)] * 2, rate) for word, rate in words.items()
    ]
    for beam in (1, 8):
        options = (*files, "--beam-size", beam)
        expected = works("transcribe", trained, *options).stdout
        assert works("transcribe", out, *options).stdout == expected
        assert expected.startswith("N OW\n")
    short = write_wave(tmp_path / "short.wav", [tone(300, 0.01)])
    for command, sentence in (
        (("transcribe", out, short), "short.wav has 160 samples at 16000 Hz, but must have at least 400"),
        (("transcribe", out, files[0], "--device", "cuda"), "cuda, but an exported model runs on the CPU"),
        (("export", out, tmp_path / "x"), "is not a model's folder"),
        (
            ("generate", out, "--engine", "onnx"),
            "has the format 'unrolled-onnx-speech' in version 1, but must",
        ),
        (("transcribe", tmp_path / "none.onnx", files[0]), "is not a model's folder"),
        (("export", trained, trained), "is not empty, but must be empty or hold an export of"),
        (("export", trained, tmp_path / "x", "--opset", 3), "opset is 3, but must be from 20 to 25"),
    ):
        assert sentence in error(*command)
    for option in (["--int8"], ["--fused"], ["--aot"], ["--temperature", 0]):
        message = error("export", trained, tmp_path / "x", *option)
        assert message.startswith(str(option[0]))
        assert message.endswith("cannot be used with models of speech")
    assert not (tmp_path / "x").exists()


def test_hugging_face_is_refused_in_one_sentence(trained: Path, tmp_path: Path) -> None:
    assert "ranscriber" in error("convert", trained, tmp_path / "hf")


def test_the_standard_error_of_two_utterances_is_what_their_errors_differ_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = torch.tensor([[0, 1, 2, 3], [4, IGNORED, IGNORED, IGNORED]])
    dataset = SimpleNamespace(
        vocabulary=data.Vocabulary(
            "speech", units=["a", "b", "c", "d", "e"], rate=8_000, n_mels=8, counted="word"
        ),
        eval_batches=lambda size: [data.Batch(torch.zeros(2, 1, 8), said)],
    )
    monkeypatch.setattr(
        generation, "transcribe", lambda model, rows, beam_size: [said[0], torch.tensor([3, 3])]
    )
    found = error_rate(None, dataset, 2, 1)
    assert (found.errors, found.units) == (2, 5)  # one is wrong, and one too many
    # The errors are 0 of 4 and 2 of 1: both differ by 1.6 from 2 / 5 of the words.
    assert found.standard_error == pytest.approx(2 * 1.6 / 5)


def test_sounds_are_transcribed_without_their_padding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"name": "spoken_digits", "data_dir": str(folder), "val_size": 12, "most": 4}
    dataset, lengths = run_config.resolve({"data": settings}).dataset, []

    def transcribe(model, rows, beam_size):
        lengths.extend(map(len, rows))
        return [torch.tensor([1])] * len(rows)

    monkeypatch.setattr(generation, "transcribe", transcribe)
    error_rate(None, dataset, 6, 1)
    assert lengths == [batch.inputs.shape[1] for batch in dataset.eval_batches(1)]
    assert len(set(lengths)) > 2

"""`unrolled export`, and `unrolled generate --engine onnx` on what it wrote."""

import json

import pytest
import torch
from commands import error, works

from unrolled.data import Vocabulary
from unrolled.models import Decoder, DecoderConfig

pytest.importorskip("onnxruntime")


def save(folder, **fields):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(4, d_model=8, n_layers=1, n_heads=2, **fields))
    Vocabulary("text", characters=["\n", "a", "b", "c"]).attach(model).save(folder)


def generated(*words):
    return works("generate", *words).stdout


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    run_dir, out = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("out")
    save(run_dir, max_length=30)
    assert "plain.onnx" in works("export", run_dir, out, "--temperature", 0).stdout
    return run_dir, out


@pytest.mark.slow
def test_both_engines_write_the_same(folders):
    run_dir, out = folders
    words = ("--prompt", "ab", "--tokens", 20)
    greedy = generated(run_dir, "--temperature", 0, *words)
    assert generated(out, "--engine", "onnx", *words) == greedy  # the default of the folder
    drawn = ("--temperature", 1, "--seed", 3, *words)
    assert generated(out, "--engine", "onnx", *drawn) == generated(run_dir, *drawn)
    assert json.loads((out / "manifest.json").read_text())["sampling"]["temperature"] == 0


@pytest.mark.slow
def test_a_folder_of_the_wrong_kind(folders, tmp_path):
    run_dir, out = folders
    for arguments, sentence in (
        (
            ("generate", out),
            "is a folder of unrolled export: use --engine onnx, or unrolled transcribe for speech",
        ),
        (("generate", run_dir, "--engine", "onnx"), "is not a folder of unrolled export"),
        (("generate", run_dir, "--graph", "int8"), "--graph is int8, but requires --engine onnx"),
        (("generate", out, "--engine", "onnx", "--graph", "int8"), "export again with --int8"),
        (("generate", out, "--engine", "onnx", "--weights", "int8"), "--weights is for --engine torch"),
        (("generate", out, "--engine", "onnx", "--device", "cuda"), "runs on the CPU"),
        (("generate", out, "--engine", "onnx", "--tokens", 40), "the model has 30 positions"),
        (("generate", out, "--engine", "onnx", "--prompt", "a" * 31), "--prompt has 31 tokens, too many"),
        (("generate", run_dir, "--prompt", "a" * 31), "too many for the 30 positions of the model"),
        (("export", out, tmp_path / "x"), "is not a model's folder but an exported model, which"),
        (("info", out), "is not a model's folder but an exported model, which"),
        (("export", run_dir, tmp_path / "x", "--opset", 3), "must be from 20 to 25"),
    ):
        assert sentence in error(*arguments)


@pytest.mark.slow
def test_an_export_leaves_no_graph_of_an_earlier_one(tmp_path):
    save(tmp_path / "run", positions="none")
    works("export", tmp_path / "run", tmp_path / "out", "--int8")
    assert (tmp_path / "out" / "int8.onnx").exists()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    works("export", tmp_path / "run", tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"manifest.json", "mine.txt", "plain.onnx", "vocabulary.json"}


def test_a_start_symbol_takes_a_position(tmp_path):
    save(tmp_path, start_token=True, max_length=9)
    printed = generated(tmp_path, "--prompt", "ab", "--seed", 0)
    assert len(printed) == 2 + 7 + 1  # the prompt, 9 - 3 + 1 tokens and the end of the line

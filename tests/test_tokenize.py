"""`unrolled tokenize`, and models of tokens through all commands."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import error, everything, works
from corpora import story, write_lines
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from unrolled import models
from unrolled.cli import run_config
from unrolled.cli.generate import _Sample
from unrolled.data import Vocabulary
from unrolled.data._tokenizer import TextTokenizer
from unrolled.models import Decoder, DecoderConfig

SMALL = [
    "model.d_model=16",
    "model.n_layers=1",
    "model.n_heads=2",
    "model.positions=rotary",
    "data.length=32",
]
SMALL += ["train.batch_size=4", "train.steps=20", "train.eval_every=10", "train.eval_batches=3"]
TEXTS = [story(i) for i in range(200)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    source, out = write_lines(root / "stories.jsonl.zst", TEXTS), root / "tokens"
    printed = works("tokenize", source, "--out", out, "--vocab-size", 300, "--val-fraction", 0.1, "--jobs", 2)
    assert re.search(r"tokens: 200 documents, [\d,]+ tokens \(.* bytes per token, 300 ids\n", printed.stdout)
    assert re.search(r"[\d,]+ tokens in \d+\.\d s, [\d,]+ tokens/s", printed.stdout)
    return out


@pytest.fixture(scope="module", params=["tokens", "text"])
def trained(request, corpus, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp(f"runs-{request.param}")
    settings = ["data.name=tokens", f"data.path={corpus}", "data.documents=separate"]
    if request.param == "text":
        (root / "book.txt").write_text("".join(TEXTS))
        settings = [
            "data.name=text",
            f"data.path={root / 'book.txt'}",
            "data.level=bpe",
            "data.vocab_size=300",
        ]
    works("train", *settings, *SMALL, f"run_dir={root / 'run'}")
    return root / "run"


def test_the_command_repeated_finds_its_files_intact(corpus, monkeypatch):
    before = everything(corpus)
    command = ["tokenize", corpus.parent / "stories.jsonl.zst", "--out", corpus]
    settings = ["--vocab-size", 300, "--val-fraction", 0.1]
    assert "it was finished before; its files are intact" in works(*command, *settings).stdout
    monkeypatch.chdir(corpus.parent)
    in_the_folder = ["tokenize", "stories.jsonl.zst", "--out", corpus]
    assert "it was finished before; its files are intact" in works(*in_the_folder, *settings).stdout
    assert everything(corpus) == before
    assert "of other settings (vocab_size)" in error(*command, "--val-fraction", 0.1)


def test_a_text_is_cut_at_a_separator(tmp_path):
    (tmp_path / "x.txt").write_text("\n\n".join(["one two", "three\nfour", "five"] * 30))
    for name, separator in (("out", r"\n\n"), ("windows", r"\r\n\r\n")):
        options = ["--tokenizer", "bytes", "--separator", separator, "--val-fraction", 0.2]
        printed = works("tokenize", tmp_path / "x.txt", "--out", tmp_path / name, *options).stdout
        assert "90 documents" in printed
    assert "whole: 1 document, " in works("tokenize", tmp_path / "x.txt", "--out", tmp_path / "whole").stdout


def test_the_run_folder_has_the_tokenizer(trained):
    vocabulary = Vocabulary.load(trained)
    assert (vocabulary.kind, vocabulary.end) == ("tokenizer", 0)
    vocabulary.check(models.load(trained).config.vocab_size)
    text = "the cat <|endoftext|> é€😀"
    assert vocabulary.decode(torch.tensor(vocabulary.encode(text))) == text
    run = run_config.resolve(run_config.read_saved(trained))
    assert vocabulary.same_ids(run.dataset.vocabulary)


def test_a_run_repeated_is_recognised(trained, tmp_path):
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    before = everything(folder)
    works("train", "--config", folder / "run.yaml", f"run_dir={folder}")
    events = [json.loads(line)["event"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert events[-1] == "resume"
    after = everything(folder)
    assert all(after[name] == before[name] for name in ("model.safetensors", "vocabulary.json"))
    option, value = ("val_fraction", 0.3) if "text" in str(trained) else ("order", "consecutive")
    printed = error("train", "--config", folder / "run.yaml", f"data.{option}={value}", f"run_dir={folder}")
    assert f"cannot be resumed: data.options.{option} was" in printed


def test_text_is_generated(trained):
    printed = works("generate", trained, "--prompt", "the cat é", "--tokens", 30, "--seed", 0).stdout
    assert printed.startswith("the cat é")
    assert len(printed) > 30
    several = works(
        "generate", trained, "--prompt", "the cat é", "--tokens", 30, "--seed", 0, "--num-samples", 3
    ).stdout.split("---\n")
    assert len(several) == 3
    assert several[0] == printed
    letter = printed.removeprefix("the cat é")[4]
    stopped = works(
        "generate", trained, "--prompt", "the cat é", "--tokens", 30, "--seed", 0, "--stop", letter
    ).stdout
    assert stopped.rstrip("\n").endswith(letter)
    assert stopped.removeprefix("the cat é").count(letter) == 1
    assert printed.startswith(stopped.rstrip("\n"))
    assert "--stop is empty" in error("generate", trained, "--stop", "")


def test_evaluation_tells_bits_per_byte(trained, tmp_path):
    printed = works("evaluate", trained, "--out", tmp_path / "figures.json").stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    dataset = run_config.resolve(run_config.read_saved(trained)).dataset
    vocabulary, size, targets = Vocabulary.load(trained), 0, 0
    for batch in dataset.eval_batches(8):
        known = batch.targets[batch.targets >= 0]
        size += sum(len(vocabulary.decode(x[None]).encode(errors="replace")) for x in known if x > 256)
        size += sum(1 for x in known if 0 < x <= 256)  # a byte
        targets += len(known)
    assert figures["splits"]["validation"][1] == targets
    expected = figures["loss"] * targets / math.log(2) / size
    assert figures["bits_per_byte"] == pytest.approx(expected, rel=0.02)  # tokens with parts of characters
    assert f"{figures['bits_per_byte']:.4f} bits/byte" in printed
    by_plan = works("evaluate", trained, "--weights", "fp32").stdout
    losses = [float(x.split()[2]) for x in (printed, by_plan)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


def test_the_data_of_another_tokenizer_are_not_evaluated(trained, tmp_path):
    path = trained / "vocabulary.json"
    before = path.read_text()
    path.write_text(before.replace('"end": 0', '"end": 1'))
    try:
        printed = error("evaluate", trained)
        assert (
            "have other ids than its vocabulary.json" in printed
            or "was changed after it was saved" in printed
        )
    finally:
        path.write_text(before)


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["text"], indirect=True)
def test_weights_are_packed_and_graphs_exported(trained, tmp_path):
    works("quantize", trained, "--out", tmp_path / "int8")
    greedy = ["--prompt", "the dog", "--tokens", 8, "--temperature", 0]
    expected = works("generate", trained, *greedy).stdout
    assert works("generate", tmp_path / "int8", *greedy).stdout.startswith("the dog")
    works("export", trained, tmp_path / "onnx")
    assert works("generate", tmp_path / "onnx", "--engine", "onnx", *greedy).stdout == expected


@pytest.mark.parametrize("trained", ["text"], indirect=True)
def test_transformers_have_the_same_ids(trained, tmp_path):
    from transformers import AutoTokenizer

    works("convert", trained, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    vocabulary = Vocabulary.load(trained)
    for text in ("the cat sat", " two  blanks\n\n", "é€😀 it's"):
        assert tokenizer(text)["input_ids"] == vocabulary.encode(text)
        assert tokenizer.decode(vocabulary.encode(text)) == text
    assert tokenizer.eos_token_id == 0
    assert json.loads((tmp_path / "hf/generation_config.json").read_text())["eos_token_id"] == 0
    works("convert", tmp_path / "hf", tmp_path / "back")
    assert Vocabulary.load(tmp_path / "back") == vocabulary


def test_the_server_reads_and_writes_its_tokens(trained):
    from unrolled.serving.model import open_model

    served = open_model(trained)
    text = served.text
    assert text is not None
    assert (text.ends, text.special_tokens) == ([[0]], {"eos_token": "<|endoftext|>"})
    vocabulary = Vocabulary.load(trained)
    for said in ("the cat sat", "é€😀", "", " a\n"):
        ids = text.encode(said)
        assert ids == vocabulary.encode(said)
        assert text.decode(ids) == said
        read = text.reader()
        assert "".join(read([id]) for id in ids) + read([], final=True) == said
    read = text.reader()
    assert read(text.encode("a€")[:-1]) == "a"
    assert read([], final=True) == "\ufffd"
    assert (text.piece(0), text.decode([0, 299, 5_000])) == ("<|endoftext|>", text.decode([299]))


def test_a_mixture_is_planned_and_trained(corpus, tmp_path):
    other = tmp_path / "more"
    works(
        "tokenize",
        write_lines(tmp_path / "m.jsonl", TEXTS),
        "--out",
        other,
        "--tokenizer",
        corpus / "tokenizer.json",
    )
    path = f"data.path={{{corpus}: 0.7, {other}: 0.3}}"
    settings = ["data.name=tokens", path, *SMALL, f"run_dir={tmp_path / 'run'}"]
    assert "tokens/s" in works("train", "--dry-run", *settings).stdout
    assert not (tmp_path / "run").exists()
    works("train", *settings)
    assert models.load(tmp_path / "run").config.vocab_size == 300
    assert run_config.read_saved(tmp_path / "run")["data"]["path"] == {str(corpus): 0.7, str(other): 0.3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{x}/none.txt"], "none.txt is missing"),
        (["{x}"], "is a folder, but must be a file"),
        (["{x}/a.txt", "{x}/./a.txt"], "a file is named twice"),
        (["{x}/a.txt", "--vocab-size", "256"], "--vocab-size is 256, but must be from 257"),
        (["{x}/a.txt", "--tokenizer", "bytes", "--vocab-size", "300"], "--vocab-size is for --tokenizer bpe"),
        (["{x}/a.txt", "--tokenizer", "nowhere.json"], "nowhere.json is missing"),
        (["{x}/a.txt", "--end", "</s>"], "--end is for a tokenizer.json"),
        (["{x}/a.txt", "--sample", "0"], "--sample is 0, but must be at least 1"),
        (["{x}/a.txt", "--jobs", "0"], "--jobs is 0, but must be from 1 to 1024"),
        (["{x}/a.txt", "--shard-tokens", "0"], "--shard-tokens is 0, but must be from 1"),
        (["{x}/a.txt", "--val-fraction", "1"], "--val-fraction is 1.0, but must be above 0 and below 1"),
        (["{x}/a.txt", "--separator", ""], "--separator is empty"),
        (["{x}/a.jsonl", "--separator", "x"], "--separator is for text, but no file is one"),
        (["{x}/a.txt", "--field", "body"], "--field is for .jsonl and .parquet, but all files are text"),
        (["{x}/empty.txt"], "the files have no text"),
        (["{x}/binary.txt"], "binary.txt is not text in UTF-8"),
        (["{x}/a.jsonl", "--field", "body"], "line 1 has no field 'body'; its fields are 'id', 'text'"),
        (["{x}/a.txt", "--tokenizer", "{x}/a.txt"], "a.txt cannot be read: it is not a tokenizer"),
    ],
)
def test_wrong_arguments_are_one_sentence(tmp_path, arguments, message):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    write_lines(tmp_path / "a.jsonl", ["a", "b"])
    arguments = [argument.format(x=tmp_path) for argument in arguments]
    assert message in error("tokenize", *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pipe_is_refused_by_name(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    printed = error("tokenize", tmp_path / "pipe", "--out", tmp_path / "out")
    assert printed.startswith(f"{tmp_path / 'pipe'} is a pipe or a device, but must be a file")


def test_a_corpus_stays_if_another_cannot_be_made_in_its_place(tmp_path, corpus):
    before = {file.name: file.read_bytes() for file in corpus.iterdir()}
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "bare.json").write_text(Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?")).to_str())
    command = [
        "tokenize",
        tmp_path / "a.txt",
        "--tokenizer",
        tmp_path / "bare.json",
        "--out",
        corpus,
        "--force",
    ]
    assert "has no token that ends a document" in error(*command)
    assert {file.name: file.read_bytes() for file in corpus.iterdir()} == before


def test_a_folder_of_something_else_is_left_alone(tmp_path, corpus):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    command = ["tokenize", tmp_path / "a.txt", "--tokenizer", "bytes", "--out", tmp_path / "out"]
    assert "is not empty, but must be empty or hold a corpus of unrolled tokenize" in error(*command)
    works(*command, "--force")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
    assert "mine.txt is a file" in error(
        "tokenize", tmp_path / "a.txt", "--out", tmp_path / "out" / "mine.txt"
    )
    assert "is not a folder of unrolled tokenize" in error(
        "train", "data.name=tokens", f"data.path={tmp_path}", f"run_dir={tmp_path / 'run'}"
    )


def test_a_separator_may_be_a_tab(tmp_path):
    (tmp_path / "x.txt").write_text("\t".join(["one two", "three", "five"] * 30))
    options = ["--tokenizer", "bytes", "--separator", r"\t", "--val-fraction", 0.2]
    assert "90 documents" in works("tokenize", tmp_path / "x.txt", "--out", tmp_path / "out", *options).stdout


def test_a_field_is_named_for_some_of_the_files(tmp_path):
    (tmp_path / "a.txt").write_text("one two three " * 9)
    (tmp_path / "b.jsonl").write_text('{"body": "four five"}\n' * 9)
    options = ["--tokenizer", "bytes", "--field", "body", "--out", tmp_path / "out"]
    assert "10 documents" in works("tokenize", tmp_path / "a.txt", tmp_path / "b.jsonl", *options).stdout


def test_a_file_with_two_names_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("one two three " * 9)
    (tmp_path / "b.txt").symlink_to("a.txt")
    printed = error("tokenize", tmp_path / "a.txt", tmp_path / "b.txt", "--out", tmp_path / "out")
    assert printed == "a file is named twice, but must be named once"


def test_a_sample_ends_at_the_first_stop_text_in_it():
    sample = _Sample(Vocabulary("text", characters=["a", "b", "c"]), [], ["cab", "ca"])
    sample._read = lambda token: "bcab"  # a token may hold several stop texts
    assert not sample.add(0)
    assert sample.text == "bca"


def test_the_command_passes_on_the_end_of_documents(tmp_path: Path) -> None:
    tokenizer, given = TextTokenizer.learn([], 257), tmp_path / "tokenizer.json"
    given.write_text(tokenizer.to_json())
    (tmp_path / "text.txt").write_text("a text of some length " * 9)
    works("tokenize", tmp_path / "text.txt", "--out", tmp_path / "out", "--tokenizer", given, "--end", "Z")
    assert json.loads((tmp_path / "out/index.json").read_text())["end"] == tokenizer.id_of("Z") != 0


def test_the_end_of_a_document_ends_a_sample(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.learn_words(["x y z x y z"])
    vocabulary = Vocabulary("tokenizer", tokenizer=tokenizer.to_json(), end=tokenizer.id_of("z"))
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(4, d_model=8, n_layers=1, n_heads=2, positions="rotary"))
    vocabulary.attach(model).save(tmp_path / "run")
    for seed in range(3):
        printed = works("generate", tmp_path / "run", "--prompt", "x", "--tokens", 99, "--seed", seed).stdout
        words = printed.split()
        assert len(words) < 99
        assert "z" not in words[:-1]

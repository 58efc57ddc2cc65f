"""Training on translations, translating and measuring, from the command line."""

import json
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from commands import error, run, works
from multi30k_files import write_multi30k
from test_cli import SMALL

from unrolled import models
from unrolled.cli import _bleu as bleu_module
from unrolled.cli import run_config
from unrolled.cli._bleu import scorer
from unrolled.data import Vocabulary
from unrolled.data.multi30k import Multi30kDataset

pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield write_multi30k(tmp_path_factory.mktemp("data"), monkeypatch)


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "multi30k"
    settings = ["data.name=multi30k", "data.vocab_size=300", f"data.data_dir={folder}", f"run_dir={run_dir}"]
    ended = works("train", *settings, "train.steps=20", "train.schedule=inverse_sqrt", *SMALL)
    assert re.search(r"best validation loss \d+\.\d+ nats/token", ended.stderr)
    assert f"translate with it: unrolled translate {run_dir}" in ended.stderr
    return run_dir


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "copy"
    settings = ["data.name=copy", "data.length=8", "data.val_size=8", "train.steps=2"]
    works("train", *settings, *SMALL, f"run_dir={run_dir}")
    return run_dir


def test_a_run_is_that_of_an_encoder_decoder_with_the_ids_of_the_data(trained: Path) -> None:
    model = models.load(trained)
    assert isinstance(model, models.EncoderDecoder)
    assert (model.config.vocab_size, model.config.source_vocab_size) == (300, None)


def test_translating_needs_the_folder_of_the_run_alone(trained: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(trained, tmp_path / "run"))
    (alone / "run.yaml").unlink()
    spoken = works("translate", alone, "a dog and a tree.", "number 3: a man.", "--beam-size", 2).stdout
    assert spoken.count("\n") >= 2
    assert works("translate", alone, "a dog and a tree.", "--beam-size", 2).stdout in spoken
    piped = run("translate", alone, "--beam-size", 2, input="a dog and a tree.\n\nnumber 3: a man.\n")
    assert piped.stdout.splitlines() == [spoken.splitlines()[0], "", *spoken.splitlines()[1:]]


def test_the_best_translations_come_with_their_scores(trained: Path) -> None:
    sentences = "a dog and a tree.", "number 3: a man."
    single = works("translate", trained, *sentences, "--beam-size", 3).stdout.splitlines()
    several = works("translate", trained, *sentences, "--beam-size", 3, "--n-best", 2).stdout.splitlines()
    assert len(several) == 4
    rows = [line.split("\t") for line in several]
    assert [text for _, text in rows[::2]] == single
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert re.fullmatch(r"-\d+\.\d{4}", first[0])
        assert float(first[0]) >= float(second[0])
        assert first[1] != second[1]
    for n in 0, 5:
        printed = error("translate", trained, "a dog", "--n-best", n)
        assert printed == f"--n-best is {n}, but must be from 1 to --beam-size = 4"


def test_no_run_of_tokens_comes_twice_where_that_is_refused(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vocabulary, "decode", lambda self, ids: " ".join(map(str, ids.tolist())))

    def pairs(*options: object) -> list[tuple[str, str]]:
        ids = works("translate", trained, "a dog and a tree.", *options).stdout.split()
        return list(pairwise(ids))

    free, blocked = pairs(), pairs("--no-repeat-ngram-size", 2)
    assert len(set(free)) < len(free)
    assert len(set(blocked)) == len(blocked)
    printed = error("translate", trained, "a dog", "--no-repeat-ngram-size", -1)
    assert printed == "no_repeat_ngram_size is -1, but must be a whole number of at least 0"


def test_wrong_requests_to_translate_get_one_sentence(trained: Path, digits: Path, tmp_path: Path) -> None:
    for command, printed in (
        (("translate", trained, "a dog", " "), "sentence 2 is empty, but must have something to translate"),
        (("translate", trained), "there are no sentences: pass them as arguments or on standard input"),
        (("translate", digits, "a dog"), f"{digits} holds a model of the kind 'decoder', which does not translate; the kind must be one of encoder_decoder"),
        (("generate", trained), "holds a model of the kind 'encoder_decoder', which does not predict tokens"),
        (("translate", trained, "a \udcff dog"), "is not text: it has bytes that are not UTF-8"),
        (("attend", trained, "--text", "a \udcff dog"), "is not text: it has bytes that are not UTF-8"),
    ):  # fmt: skip
        assert printed in error(*command)
    spoiled = Path(shutil.copytree(trained, tmp_path / "spoiled"))
    for content in ({"kind": "bpe"}, {"kind": "bpe", "pieces": "{"}):
        (spoiled / "vocabulary.json").write_text(json.dumps(content))
        error("translate", spoiled, "a dog")


def test_line_n_of_the_translations_is_that_of_sentence_n(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vocabulary, "decode", lambda self, ids: "ein\nHund \u2028 l\u00e4uft\n")
    piped = run("translate", trained, "--beam-size", 1, input="a dog\u2028runs\r\na man\n")
    assert piped.stdout == "ein Hund l\u00e4uft\n" * 2
    assert run("translate", trained, input="\n \n").stdout == "\n\n"
    monkeypatch.setattr(Multi30kDataset, "decode", lambda self, ids: "ein\nHund")
    out = tmp_path / "deep" / "translations.txt"
    works("evaluate", trained, "--split", "test_2017_flickr", "--beam-size", 1, "--out", out)
    assert out.read_text() == "ein Hund\n" * 3


def test_evaluate_refuses_wrong_options_before_the_work(trained: Path) -> None:
    assert "but must be" in error("evaluate", trained, "--length-penalty", -1)  # and nothing on stdout


def test_a_beam_has_at_least_one_translation(trained: Path) -> None:
    for words in (["translate", trained, "a dog"], ["evaluate", trained]):
        result = run(*words, "--beam-size", 0)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--beam-size" in result.stderr


def test_evaluate_measures_what_sacrebleu_measures(trained: Path, tmp_path: Path) -> None:
    from sacrebleu import corpus_bleu

    out = tmp_path / "translations.txt"
    printed = works("evaluate", trained, "--split", "test_2017_flickr", "--out", out).stdout
    lines = out.read_text().splitlines()
    assert len(lines) == 3
    from unrolled.data.multi30k import read_sentences

    references = read_sentences("test_2017_flickr.de", trained_data(trained))
    expected = corpus_bleu(lines, [references]).score
    assert f"test_2017_flickr: BLEU {expected:.2f} with beam 4, length penalty 0.6" in printed
    assert "tok:13a" in printed
    assert re.search(r"validation loss \d+\.\d{4} nats/token", printed)
    assert "test_2016_flickr: BLEU" in works("evaluate", trained, "--beam-size", 1).stdout


def test_the_bleu_of_experiments_is_that_of_a_greedy_search(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sacrebleu import corpus_bleu

    dataset = run_config.resolve(run_config.read_saved(trained)).dataset
    sources, references = dataset.sentences("test_2016_flickr")
    said = [references[0], *(f"{x} und" for x in references[1:])]

    def translations(model: object, data: object, given: list[str], **search: float) -> list[str]:
        assert given == sources
        assert search["beam_size"] == 1
        return said

    monkeypatch.setattr(bleu_module, "translations_of", translations)
    found = bleu_module.bleu(None, dataset)
    assert found == pytest.approx(corpus_bleu(said, [references]).score)
    assert 0 < found < 100


def trained_data(run_dir: Path) -> str:
    return re.search("data_dir: (.*)", (run_dir / "run.yaml").read_text())[1]


def test_a_perfect_translation_has_bleu_100() -> None:
    score = scorer()
    assert score(["ein Hund läuft schnell davon ."], ["ein Hund läuft schnell davon ."])[0] == pytest.approx(
        100
    )
    assert score(["x"], ["ein Hund läuft schnell davon ."])[0] < 5


def test_wrong_requests_to_evaluate_get_one_sentence(trained: Path, digits: Path) -> None:
    assert "part is 'test', but the parts are train, val" in error("evaluate", trained, "--split", "test")
    assert "--split is for translations, but the task of" in error("evaluate", digits, "--split", "val")
    assert "--positions is for predicting tokens, but the task of" in error(
        "evaluate", trained, "--positions"
    )


def test_info_describes_a_run_of_any_kind(trained: Path) -> None:
    printed = works("info", trained).stdout
    assert "nats/token" in printed
    assert "parameters" in printed

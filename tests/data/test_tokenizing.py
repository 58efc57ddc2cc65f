"""`unrolled tokenize` as a function: the same bytes for any number of threads and wherever it was killed."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from corpora import story, tokenizing, write_corpus, write_lines

from unrolled.data._corpus import writing
from unrolled.data._corpus.index import Index
from unrolled.data._corpus.reading import Corpus
from unrolled.data._corpus.splitting import Splitting
from unrolled.data._tokenizer import END, TextTokenizer
from unrolled.folders import held

TEXTS = [story(i) for i in range(300)]


def digests(folder: Path) -> dict[str, str]:
    files = sorted(x for x in folder.iterdir() if x.name != ".lock")
    return {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for x in files}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(writing, "BATCH", 1_000)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_lines(tmp_path_factory.mktemp("source") / "x.jsonl", TEXTS)


def texts_of(corpus: Corpus, split) -> list[str]:
    ids = corpus.ids(split)
    whole, starts = ids.read(0, len(ids)), ids.starts(0, len(ids))
    return [corpus.tokenizer.decode(part.tolist()) for part in np.split(whole, starts)[1:]]


def test_the_corpus_holds_every_document_once_with_its_end(source, tmp_path):
    (tmp_path / "out").mkdir()
    index = tokenizing([source]).write(tmp_path / "out")
    corpus = Corpus(tmp_path / "out")
    assert corpus.index == index
    train, val = texts_of(corpus, "train"), texts_of(corpus, "val")
    assert sorted(train + val) == sorted(TEXTS)
    assert [x for x in TEXTS if x in set(train)] == train  # in order
    assert 10 < len(val) < 60
    assert len(index.parts) > 5  # documents reach over the border of two shards
    for split, texts in {"train": train, "val": val}.items():
        ids = corpus.ids(split).read(0, len(corpus.ids(split)))
        assert (ids == index.end).sum() == len(texts)
        assert ids[-1] == index.end
    assert index.totals == {
        "documents": 300,
        "train_tokens": len(corpus.ids("train")),
        "val_tokens": len(corpus.ids("val")),
        "text_bytes": sum(len(x.encode()) for x in TEXTS),
    }
    assert index.vocab_size == 300


def test_any_number_of_threads_gives_the_same_bytes(source, tmp_path):
    found = []
    for jobs in (1, 2, 5):
        (tmp_path / str(jobs)).mkdir()
        tokenizing([source]).write(tmp_path / str(jobs), jobs=jobs)
        found.append(digests(tmp_path / str(jobs)))
    assert found[0] == found[1] == found[2]


KILLED = """
import os, random, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from corpora import tokenizing
from unrolled.data._corpus import shards, writing

writing.BATCH = 1_000
source, out = map(Path, sys.argv[2:4])
out.mkdir()
finish, index_save = shards.GrowingFile.finish, writing.Index.save
for attempt in range(200):
    left = random.Random(attempt).randrange(1, 90)
    if (child := os.fork()) == 0:
        def count(*_):
            global left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        shards.GrowingFile.finish = lambda file: (count(), finish(file), count())[1]
        writing.Index.save = lambda index, folder: (count(), index_save(index, folder), count())[1]
        tokenizing([source]).write(out, jobs=2, on_tokens=count)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
print(attempt)
"""


@pytest.mark.slow
def test_what_was_killed_goes_on_and_ends_the_same(source, tmp_path):
    command = [sys.executable, "-c", KILLED, Path(__file__).parent.parent, source, tmp_path / "killed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert 5 < int(done.stdout) < 200
    (tmp_path / "whole").mkdir()
    tokenizing([source]).write(tmp_path / "whole")
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")


def test_finished_parts_are_kept_and_damaged_ones_are_written_again(source, tmp_path):
    (tmp_path / "out").mkdir()
    settings = tokenizing([source])
    index = settings.write(tmp_path / "out")
    before = digests(tmp_path / "out")
    kept = (tmp_path / "out/train-00001.npy").stat().st_mtime_ns
    written: list[int] = []
    assert settings.write(tmp_path / "out", on_tokens=written.append) == index
    assert written == []
    damaged = tmp_path / "out/train-00003.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    (tmp_path / "out/val-00004-starts.npy").unlink()
    settings.write(tmp_path / "out", on_tokens=written.append)
    assert digests(tmp_path / "out") == before
    assert (tmp_path / "out/train-00001.npy").stat().st_mtime_ns == kept
    assert sum(written) == sum(x.tokens for part in index.parts[3:] for x in part.shards.values())


def test_a_corpus_of_other_settings_is_not_mixed_up(source, tmp_path):
    (tmp_path / "out").mkdir()
    tokenizing([source]).write(tmp_path / "out")
    before = digests(tmp_path / "out")
    other = tokenizing([source], vocab_size=280, val_fraction=0.2)
    with pytest.raises(ValueError, match=r"of other settings \(vocab_size, val_fraction\)"):
        other.write(tmp_path / "out")
    assert digests(tmp_path / "out") == before
    assert other.write(tmp_path / "out", start_over=True).vocab_size == 280
    (tmp_path / "new").mkdir()
    other.write(tmp_path / "new")
    assert digests(tmp_path / "out") == digests(tmp_path / "new")


def test_an_edited_input_of_the_same_size_is_refused(source, tmp_path):
    content, out = source.read_bytes(), tmp_path / "out"
    out.mkdir()
    tokenizing([source]).write(out)
    before = digests(out)
    try:
        middle = content.index(b"gold", len(content) // 2)
        source.write_bytes(content[:middle] + b"lead" + content[middle + 4 :])
        with pytest.raises(ValueError, match=r"of other settings \(files\); name another folder"):
            tokenizing([source]).write(out)
    finally:
        source.write_bytes(content)
    assert tokenizing([source]).write(out).complete  # though its time of change is another
    assert digests(out) == before


def test_two_processes_do_not_write_one_folder(source, tmp_path):
    (tmp_path / "out").mkdir()
    with held(tmp_path / "out"), pytest.MonkeyPatch.context() as patch:
        import filelock

        def taken(self, *_, **__):
            raise filelock.Timeout(self.lock_file)

        patch.setattr(filelock.FileLock, "acquire", taken)
        with pytest.raises(ValueError, match="is in use: another process is writing there"):
            tokenizing([source]).write(tmp_path / "out")


def test_a_full_disk_keeps_what_is_finished(source, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    written: list[int] = []

    def full(tokenized: int) -> None:
        written.append(tokenized)
        if len(written) == 25:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        tokenizing([source]).write(tmp_path / "out", on_tokens=full)
    index = Index.load(tmp_path / "out")
    assert not index.complete
    assert len(index.parts) > 2
    assert not list((tmp_path / "out").glob("*.tmp"))
    with pytest.raises(ValueError, match="out is not finished: repeat the command unrolled tokenize"):
        Corpus(tmp_path / "out")


@pytest.mark.parametrize("texts", [["a b c " * 300 + "qzxj" * 99], ["a b c " * 300, "qzxj" * 99]])
def test_byte_pairs_are_learned_without_what_is_held_out(tmp_path, texts):
    tokenizer = Corpus(write_corpus(tmp_path / "out", texts, val_fraction=0.2)).tokenizer
    assert len(tokenizer.encode(" b")) == 1
    assert len(tokenizer.encode("qzxj")) == 4


def test_the_sample_is_the_beginning_of_every_file(tmp_path):
    files = [write_lines(tmp_path / "a.jsonl", [f"hello {i} hello" for i in range(300)])]
    files.append(write_lines(tmp_path / "b.jsonl", [f"world {i} world" for i in range(300)]))
    files.append(
        write_lines(
            tmp_path / "c.jsonl", [f"one {i}" for i in range(300)] + [f"{i} end end" for i in range(300)]
        )
    )
    for sample, learned in ((3_000, False), (10**6, True)):
        out = tmp_path / str(sample)
        out.mkdir()
        tokenizing(files, sample=sample, vocab_size=400).write(out)
        tokenizer = Corpus(out).tokenizer
        assert len(tokenizer.encode(" hello")) == len(tokenizer.encode(" world")) == 1
        assert (len(tokenizer.encode(" end")) == 1) == learned


def test_no_more_is_learned_from_than_the_sample(tmp_path):
    files = [tmp_path / f"{i}.txt" for i in range(4)]
    for i, file in enumerate(files):
        file.write_text("one two three " * 1_000 * (i + 1))
    task = tokenizing(files, sample=10_000)
    texts = list(task._texts_to_learn_from(Splitting.of(task.documents, task.val_fraction)))
    assert 5_000 < sum(map(len, texts)) <= 10_000


def test_bytes_are_a_tokenizer_without_merges(source, tmp_path):
    (tmp_path / "out").mkdir()
    index = tokenizing([source], tokenizer="bytes").write(tmp_path / "out")
    assert (index.vocab_size, index.dtype) == (257, "uint16")
    assert index.totals["train_tokens"] + index.totals["val_tokens"] == index.totals["text_bytes"] + 300


def test_a_tokenizer_of_another_library_is_taken_with_its_end(source, tmp_path):
    tokenizer = TextTokenizer.learn(TEXTS, 290)
    path = tmp_path / "given" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text(tokenizer.to_json().replace(END, "<done>"))
    (tmp_path / "out").mkdir()
    given = tokenizing([source], tokenizer=str(path))
    with pytest.raises(ValueError, match=r"tokenizer\.json has no token that ends a document: name one"):
        given.write(tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"tokenizer\.json has no token '<no>': name one of its tokens with --end"
    ):
        tokenizing([source], tokenizer=str(path), end="<no>").write(tmp_path / "out")
    for content in ('{"eos_token": "<done>"}', '{"eos_token": {"content": "<done>"}}'):
        (path.parent / "tokenizer_config.json").write_text(content)
        given.write(tmp_path / "out", start_over=True)
        assert Corpus(tmp_path / "out").tokenizer.end == 0
    (tmp_path / "same").mkdir()
    tokenizing([source], tokenizer=str(path), end="<done>").write(tmp_path / "same")
    first = "train-00000.npy"
    assert digests(tmp_path / "same")[first] == digests(tmp_path / "out")[first]
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read: it is not a tokenizer"):
        given.write(tmp_path / "out", start_over=True)


def test_many_ids_take_four_bytes(tmp_path):
    letters = {chr(0x4E00 + i): i + 1 for i in range(20_000)} | {
        chr(0xAC00 + i): 20_001 + i for i in range(11_000)
    }
    letters |= {chr(0x20000 + i): 31_001 + i for i in range(40_000)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"</s>": 0} | letters, "unk_token": "</s>"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": ""},
            "behavior": "Isolated",
            "invert": False,
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    texts = [chr(0x20000 + 39_000 + i) for i in range(20)]
    folder = write_corpus(tmp_path / "out", texts, tokenizer=str(tmp_path / "tokenizer.json"))
    corpus = Corpus(folder)
    assert corpus.index.dtype == "uint32"
    assert corpus.ids("train").read(0, 1)[0] == 31_001 + 39_000


def test_a_tokenizer_that_was_changed_is_written_again(source, tmp_path):
    (tmp_path / "out").mkdir()
    tokenizing([source]).write(tmp_path / "out")
    before, file = digests(tmp_path / "out"), tmp_path / "out/tokenizer.json"
    file.write_bytes(file.read_bytes() + b" ")
    assert tokenizing([source]).write(tmp_path / "out").complete
    assert digests(tmp_path / "out") == before


def test_the_documents_of_a_file_share_its_part_of_the_sample(tmp_path):
    source = write_lines(tmp_path / "all.jsonl", [f"{i:010}" for i in range(20)])
    task = tokenizing([source], sample=45)
    texts = list(task._texts_to_learn_from(Splitting.of(task.documents, 0.1)))
    assert len("".join(texts)) <= 45
    assert len(texts[-1]) == 5


def test_another_end_of_documents_is_another_setting(source, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(TextTokenizer.learn(TEXTS, 290).to_json())
    (tmp_path / "out").mkdir()
    tokenizing([source], tokenizer=str(path)).write(tmp_path / "out")
    with pytest.raises(ValueError, match=r"of other settings \(end\)"):
        tokenizing([source], tokenizer=str(path), end="Z").write(tmp_path / "out")

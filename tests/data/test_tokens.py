"""Tokenised corpora as a data set: windows, epochs, separate documents, rows that read on, mixtures."""

import json
import random
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import story, write_corpus

from unrolled import data
from unrolled.contract import IGNORED, Batch
from unrolled.data._corpus.index import Index, Part, Shard
from unrolled.data._corpus.reading import Corpus
from unrolled.data._mixture import drawn_sources
from unrolled.data.tokens import TokensDataset
from unrolled.training.memory import STATUS

TEXTS = [story(i, words=5 + i % 40) for i in range(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpora") / "stories", TEXTS)


def ids_of(folder: Path, split: data.Split = "train") -> np.ndarray:
    ids = Corpus(folder).ids(split)
    return ids.read(0, len(ids))


def test_ids_are_read_over_the_borders_of_shards(folder):
    corpus = Corpus(folder)
    assert len(corpus.index.parts) > 5
    arrays = [np.load(path) for path in sorted(folder.glob("train-*[0-9].npy"))]
    whole = np.concatenate(arrays)
    ids = corpus.ids("train")
    assert len(ids) == len(whole)
    ends = np.flatnonzero(whole == corpus.index.end) + 1
    borders = np.cumsum([0, *map(len, arrays)])
    for start in {0, len(whole) - 20, *(borders - 7).clip(0).tolist(), *borders[:-1].tolist()}:
        for length in (0, 1, 7, 20, 700):
            stop = min(start + length, len(whole))
            assert ids.read(start, stop).tolist() == whole[start:stop].tolist()
            expected = [x - start for x in [0, *ends.tolist()] if start <= x < stop]
            assert ids.starts(start, stop).tolist() == expected


def test_the_checksum_is_that_of_the_ids_wherever_they_are(folder, tmp_path):
    found = TokensDataset(folder, length=16).ids_checksum
    assert TokensDataset(copied(folder, tmp_path / "copy"), length=8).ids_checksum == found
    edited = write_corpus(tmp_path / "edited", [*TEXTS[:150], TEXTS[150][::-1], *TEXTS[151:]])
    assert TokensDataset(edited, length=16).ids_checksum != found


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_an_epoch_has_every_window_once(folder, batch_size):
    dataset = TokensDataset(folder, length=16)
    whole = ids_of(folder)
    size = (len(whole) - 1) // 16
    rows = []
    for step in range(-(-size // batch_size)):
        batch = dataset.batch("train", step=step, batch_size=batch_size, seed=3)
        assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        assert batch.cu_seqlens is batch.continues is batch.key_padding_mask is None
        rows += torch.cat([batch.inputs, batch.targets[:, -1:]], 1).tolist()
    expected = sorted(whole[i * 16 : i * 16 + 17].tolist() for i in range(size))
    assert sorted(rows[:size]) == expected
    assert rows[:size] != expected


def test_evaluation_predicts_every_token_but_the_first_once(folder):
    for documents in ("joined", "separate"):
        dataset = TokensDataset(folder, length=24, documents=documents)
        val = ids_of(folder, "val")
        for batch_size in (1, 5, 1_000):
            batches = list(dataset.eval_batches(batch_size))
            assert sum(len(batch.inputs) for batch in batches) == dataset.epoch_size("val")
            targets = torch.cat([batch.targets for batch in batches]).flatten()
            known = targets != IGNORED
            follows_end = np.flatnonzero(val[:-1] == 0) + 1 if documents == "separate" else []
            assert targets[known].tolist() == np.delete(val, [0, *follows_end]).tolist()


def test_separate_documents_do_not_see_each_other(folder):
    dataset = TokensDataset(folder, length=50, documents="separate")
    joined = TokensDataset(folder, length=50)
    several = 0
    for step in range(20):
        batch = dataset.batch("train", step=step, batch_size=6, seed=0)
        plain = joined.batch("train", step=step, batch_size=6, seed=0)
        assert torch.equal(batch.inputs, plain.inputs)
        assert batch.cu_seqlens.dtype == torch.int32
        inputs = batch.inputs.flatten()
        after_end = [i for i in range(1, 300) if inputs[i - 1] == 0 or i % 50 == 0]
        assert batch.cu_seqlens.tolist() == [0, *after_end, 300]
        several += len(after_end) > 5
        last = batch.inputs == 0
        assert (batch.targets[last] == IGNORED).all()
        assert torch.equal(batch.targets[~last], plain.targets[~last])
    assert several > 10


def test_a_model_reads_separate_documents_as_if_each_were_alone(folder):
    from unrolled.models import Decoder, DecoderConfig
    from unrolled.training import TrainConfig
    from unrolled.training.evaluation import batch_loss

    torch.manual_seed(0)
    model = Decoder(DecoderConfig(300, d_model=16, n_layers=1, n_heads=2, positions="rotary")).double().eval()
    dataset = TokensDataset(folder, length=60, documents="separate")
    batch = dataset.batch("train", step=0, batch_size=3, seed=0)
    losses, count = 0.0, 0
    bounds = batch.cu_seqlens.tolist()
    for start, stop in pairwise(bounds):
        inputs, targets = (x.reshape(1, -1)[:, start:stop] for x in (batch.inputs, batch.targets))
        if n := int((targets != IGNORED).sum()):
            losses, count = losses + model.loss(inputs, targets).item() * n, count + n
    assert len(bounds) > 5
    loss = batch_loss(model, batch, TrainConfig(steps=1), torch.device("cpu"))
    assert loss.item() == pytest.approx(losses / count, rel=1e-13)


@pytest.mark.parametrize("name", ["tokens", "text"])
def test_rows_read_on_in_consecutive_order(folder, tmp_path, name):
    if name == "text":
        (tmp_path / "book.txt").write_text("".join(TEXTS))
        dataset = data.load("text", path=tmp_path / "book.txt", length=20, order="consecutive")
    else:
        dataset = data.load("tokens", path=folder, length=20, order="consecutive")
    before: Batch | None = None
    going = 0
    for step in range(60):
        batch = dataset.batch("train", step=step, batch_size=4, seed=1)
        assert batch.continues.dtype == torch.bool
        if before is not None:
            rows = batch.continues
            going += int(rows.sum())
            assert torch.equal(batch.inputs[rows, 0], before.targets[rows, -1])
        else:
            assert not batch.continues.any()
        before = batch
    assert going > 200
    other = dataset.batch("train", step=0, batch_size=4, seed=2)
    assert not torch.equal(other.inputs, dataset.batch("train", step=0, batch_size=4, seed=1).inputs)


def test_a_row_that_begins_with_a_document_does_not_go_on(tmp_path):
    texts = [f"{i:03}" for i in range(200)]  # of 3 bytes and an end
    folder = write_corpus(tmp_path / "short", texts, tokenizer="bytes")
    for documents, goes_on in (("joined", True), ("separate", False)):
        dataset = TokensDataset(folder, length=4, documents=documents, order="consecutive")
        found = dataset.batch("train", step=1, batch_size=2, seed=0)
        assert found.continues.tolist() == [goes_on] * 2
    found = TokensDataset(folder, length=5, documents="separate", order="consecutive")
    assert any(found.batch("train", step=s, batch_size=2, seed=0).continues.any() for s in range(1, 4))


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """Two corpora in which no window occurs twice."""
    root, draw = tmp_path_factory.mktemp("pair"), random.Random(0)
    texts = [[draw.randbytes(40).hex() for _ in range(count)] for count in (200, 300)]
    made = [write_corpus(root / name, x, tokenizer="bytes") for name, x in zip("ab", texts, strict=True)]
    return made[0], made[1]


def test_rows_of_a_mixture_come_by_weight_and_each_corpus_has_its_epochs(pair):
    length = 16
    dataset = TokensDataset({str(pair[0]): 3.0, str(pair[1]): 1.0}, length=length)
    windows = [ids_of(folder) for folder in pair]
    known = {
        tuple(ids[i : i + length].tolist()): (which, i // length)
        for which, ids in enumerate(windows)
        for i in range(0, len(ids) - length, length)
    }
    sizes = [(len(ids) - 1) // length for ids in windows]
    assert len(known) == sum(sizes)
    batches = [dataset.batch("train", step=step, batch_size=20, seed=0) for step in range(200)]
    rows = [known[tuple(row)] for batch in batches for row in batch.inputs.tolist()]
    assert sum(source == 0 for source, _ in rows) == pytest.approx(3_000, abs=100)
    for which, size in enumerate(sizes):
        numbers = [number for source, number in rows if source == which]
        for epoch in range(len(numbers) // size):
            assert sorted(numbers[epoch * size : (epoch + 1) * size]) == list(range(size))
        assert len(numbers) > size // 2
    apart = [TokensDataset(folder, length=length) for folder in pair]
    assert dataset.epoch_size("val") == sum(each.epoch_size("val") for each in apart)
    val = [batch.targets[batch.targets != IGNORED].tolist() for batch in dataset.eval_batches(7)]
    assert sum(val, []) == [x for folder in pair for x in ids_of(folder, "val")[1:]]  # noqa: RUF017


def test_batches_are_pure_functions(pair):
    made = [TokensDataset({str(x): 1.0 for x in pair}, length=8, documents="separate") for _ in range(2)]
    for step in (5, 0, 5):
        one, other = (x.batch("train", step=step, batch_size=3, seed=1) for x in made)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def copied(folder: Path, out: Path) -> Path:
    return Path(shutil.copytree(folder, out))


def damage(name: str, change):
    def apply(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return apply


WRONG = {
    "no index": (lambda x: (x / "index.json").unlink(), "is not a folder of unrolled tokenize: it has no index.json"),
    "another index": (lambda x: (x / "index.json").write_text('{"format": "x"}'), "has the format"),
    "no JSON": (lambda x: (x / "index.json").write_text("{"), "is damaged: it has no format"),
    "other totals": (damage("index.json", lambda x: x.replace(b'"documents": 300', b'"documents": 301')), "its totals are"),
    "fields missing": (damage("index.json", lambda x: x.replace(b'"end"', b'"and"')), "index.json is damaged: KeyError"),
    "not finished": (damage("index.json", lambda x: x.replace(b"true", b"false")), "is not finished: repeat the command"),
    "no tokenizer": (lambda x: (x / "tokenizer.json").unlink(), "tokenizer.json is missing: repeat the command"),
    "another tokenizer": (damage("tokenizer.json", lambda x: x + b" "), "is not the tokenizer that the corpus was made"),
    "no shard": (lambda x: (x / "train-00002.npy").unlink(), "train-00002.npy cannot be read: No such file"),
    "shard cut off": (damage("val-00000.npy", lambda x: x[:-2]), "val-00000.npy is damaged: it has .* bytes instead of"),
    "starts cut off": (damage("train-00000-starts.npy", lambda x: x[:-4]), "train-00000-starts.npy is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_damaged_folder_is_refused_in_one_sentence(folder, tmp_path, fault):
    spoil, message = WRONG[fault]
    copy = copied(folder, tmp_path / "copy")
    spoil(copy)
    with pytest.raises(ValueError, match=message) as raised:
        TokensDataset(copy, length=16)
    assert "\n" not in str(raised.value)


def test_damage_inside_a_shard_is_found_where_it_is_read(folder, tmp_path):
    for name, change, message in (
        ("train-00000.npy", lambda x: x[:-400] + b"\xff" * 400, "has the id 65535, but the ids are 0 to 299"),
        ("train-00000.npy", lambda x: b"X" * 10 + x[10:], "train-00000.npy is damaged: "),
        ("train-00000.npy", lambda x: x.replace(b"<u2", b"<i2"), "it holds int16 of the shape"),
    ):
        copy = copied(folder, tmp_path / message[:9])
        damage(name, change)(copy)
        dataset = TokensDataset(copy, length=16)
        with pytest.raises(ValueError, match=message):
            dataset.batch("train", step=0, batch_size=1_500, seed=0)


def test_impossible_options_are_refused(folder, pair, tmp_path):
    alien = write_corpus(tmp_path / "alien", TEXTS[:30], vocab_size=280)
    both = {str(x): 1.0 for x in pair}
    for options, message in (
        ({}, "path is '', but must be a folder of unrolled tokenize"),
        ({"path": str(tmp_path / "none")}, "none is not a folder of unrolled tokenize"),
        ({"path": {}}, "path is {}, but must be"),
        ({"path": {str(folder): 0.0}}, "path is .*, but must be"),
        (
            {"path": folder, "length": 10**6},
            r"length is 1000000, but must be less than the \d+ tokens of the train",
        ),
        (
            {"path": folder, "documents": "alone"},
            "documents is 'alone', but must be one of 'joined', 'separate'",
        ),
        ({"path": both, "order": "consecutive"}, "order is 'consecutive', but must be 'random' for several"),
        (
            {"path": {f"{folder}/{'./' * i}": 1.0 for i in range(65)}},
            "has 65 corpora, but must have at most 64",
        ),
        ({"path": {f"{folder}": 1.0, f"{folder}/.": 2.0}}, "path is .* but must name each corpus once"),
        ({"path": {str(folder): 1.0, str(alien): 1.0}}, "stories and .*alien have different tokenizers"),
    ):
        with pytest.raises(ValueError, match=message):
            data.load("tokens", **options)


SPARSE = """
import hashlib, json, sys, time
import numpy, torch
from unrolled import data
from unrolled.training import train  # what a run imports
from unrolled.training.memory import process_bytes
began = time.perf_counter()
dataset = data.load("tokens", path=sys.argv[1], length=1023)
opened = time.perf_counter() - began
ids, = dataset._ids["train"]
read, starts = ids.read, []
ids.read = lambda start, stop: (starts.append(start), read(start, stop))[1]
digests = []
for step in range(int(sys.argv[2]), 40):
    inputs = dataset.batch("train", step=step, batch_size=8, seed=0).inputs
    rows = zip(inputs, starts[-8:], strict=True)
    digests.append([hashlib.sha256(row.numpy().tobytes() + b"%d" % x).hexdigest() for row, x in rows])
peak = process_bytes("VmHWM") / 2**20
print(json.dumps([opened, peak, digests, dataset.epoch_size("train")]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells the peak of the memory in a file")
def test_75_gib_are_opened_at_once_and_stay_on_the_disk(folder, tmp_path):
    out = copied(folder, tmp_path / "sparse")
    index, count, tokens = Index.load(out), 76, 2**29
    sizes = {}
    for number in range(count):
        for split, length in (("train", tokens), ("val", 2_000)):
            names = [out / f"{split}-{number:05}{x}.npy" for x in ("", "-starts")]
            with names[0].open("wb") as file:
                header = np.lib.format.header_data_from_array_1_0(np.empty(0, np.uint16))
                np.lib.format.write_array_header_1_0(file, header | {"shape": (length,)})
                file.truncate(file.tell() + 2 * length)
            np.save(names[1], np.zeros(1, np.uint32))
            sizes[split] = (names[0].stat().st_size, names[1].stat().st_size)
    shards = {s: Shard(n, 1, sizes[s], ("", "")) for s, n in (("train", tokens), ("val", 2_000))}
    index.parts = [Part(shards, 1, 1, (0, 0, 0))] * count
    index.save(out)
    assert count * sizes["train"][0] > 75 * 2**30
    results = []
    for first in (0, 20):  # a run, and the same run resumed
        command = [sys.executable, "-c", SPARSE, str(out), str(first)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        results.append(json.loads(done.stdout))
    for opened, peak, _, windows in results:
        assert opened < 1
        assert peak < 400
        assert windows == -(-(count * tokens - 1) // 1023)
    digests = results[0][2]
    assert results[1][2] == digests[20:]
    assert len({x for rows in digests for x in rows}) == 320  # of windows that were read once each


def test_each_corpus_of_a_mixture_has_an_order_of_its_own(folder, tmp_path):
    twice = {str(folder): 1.0, str(copied(folder, tmp_path / "copy")): 1.0}
    batch = TokensDataset(twice, length=16).batch("train", step=0, batch_size=100, seed=0)
    sources, _ = drawn_sources([1.0, 1.0], step=0, batch_size=100, seed=0)
    first, second = (batch.inputs[torch.from_numpy(sources == source)][:30] for source in (0, 1))
    assert (first != second).any(1).sum() > 25


def test_the_checksum_is_that_of_the_ids_not_only_of_the_places_of_documents(tmp_path):
    found = []
    for name in ("cat", "dog"):
        made = write_corpus(tmp_path / name, [*TEXTS[:20], f"the {name}"], tokenizer="bytes")
        found.append((TokensDataset(made, length=16).ids_checksum, Corpus(made).index.totals))
    assert found[0][1] == found[1][1]
    assert found[0][0] != found[1][0]


def test_corpora_whose_documents_end_differently_are_not_mixed(folder, tmp_path):
    given = {"tokenizer": str(folder / "tokenizer.json")}
    ends = {"one": None, "other": "Z"}
    both = {
        str(write_corpus(tmp_path / name, TEXTS[:30], end=end, **given)): 1.0 for name, end in ends.items()
    }
    with pytest.raises(ValueError, match=r"one and .*other have different"):
        TokensDataset(both, length=16)


def test_the_first_id_beyond_the_tokenizer_is_found(folder, tmp_path):
    copy = copied(folder, tmp_path / "copy")
    damage("train-00000.npy", lambda x: x[:-400] + (300).to_bytes(2, "little") * 200)(copy)
    with pytest.raises(ValueError, match="has the id 300, but the ids are 0 to 299"):
        TokensDataset(copy, length=16).batch("train", step=0, batch_size=1_500, seed=0)


def test_the_checksum_is_that_of_the_documents_held_out_too(tmp_path):
    found = []
    for name in ("cat", "dog"):  # of a single document, the end is held out
        made = write_corpus(tmp_path / name, [f"{TEXTS[39][:100] * 3}the {name}"], tokenizer="bytes")
        found.append((TokensDataset(made, length=4).ids_checksum, ids_of(made).tolist()))
    assert found[0][1] == found[1][1]
    assert found[0][0] != found[1][0]


def test_a_window_and_the_token_after_it_must_fit_into_a_split(folder):
    n = len(ids_of(folder, "val"))
    with pytest.raises(ValueError, match=f"length is {n}, but must be less than the {n} tokens of the val"):
        TokensDataset(folder, length=n)
    assert TokensDataset(folder, length=n - 1).epoch_size("val") == 1

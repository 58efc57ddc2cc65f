import gzip
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from multi30k_files import write_multi30k

from unrolled import data
from unrolled.cli import run_config
from unrolled.contract import IGNORED
from unrolled.data import multi30k
from unrolled.data._bpe import END_ID, BytePairs
from unrolled.data.multi30k import PARTS, POOL, Multi30kDataset

pytest.importorskip("tokenizers")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_multi30k(tmp_path, monkeypatch)


@pytest.fixture
def dataset(files: Path) -> Multi30kDataset:
    return data.load("multi30k", data_dir=files, vocab_size=300)


def test_a_text_comes_back_whatever_it_says(dataset):
    for text in ("a dog and a tree.", "Ein größerer Kahn", "日本 </s> 🙂", "two  blanks", "", "x\ny", " a"):
        ids = dataset.encode(text)
        assert ids[-1] == END_ID
        assert (ids == END_ID).sum() == 1
        assert ids.max() < dataset.vocab_size
        assert dataset.decode(ids) == text
    assert dataset.decode([*dataset.encode("a dog"), *dataset.encode("and more")]) == "a dog"


def test_frequent_words_become_few_ids(dataset):
    assert len(dataset.encode("number")) < len(dataset.encode("zwxqvk"))


def test_the_same_text_gives_the_same_ids_and_json_keeps_them(files, dataset):
    again = data.load("multi30k", data_dir=files, vocab_size=300)
    assert again.pieces.to_json() == dataset.pieces.to_json()
    kept = BytePairs.of_json(dataset.pieces.to_json())
    assert torch.equal(kept.encode("ein </s> Baum"), dataset.encode("ein </s> Baum"))
    assert len(kept) == len(dataset.pieces) <= 300


def test_what_is_no_tokenizer_is_refused():
    with pytest.raises(ValueError, match="it is not a tokenizer"):
        BytePairs.of_json('{"model": 3}')


def test_pairs_are_padded_at_their_ends(dataset):
    for split in ("train", "val"):
        inputs, targets, padding, *_ = dataset.batch(split, step=0, batch_size=8, seed=0)
        assert inputs.shape == padding.shape
        assert len(targets) == len(inputs) == 8
        for source, padded, target in zip(inputs, padding, targets, strict=True):
            length = int((~padded).sum())
            assert not padded[:length].any()
            assert source[length - 1] == END_ID
            number = re.match(r"number (\d+):", dataset.decode(source[:length]))
            said = target[target != IGNORED]
            assert said[-1] == END_ID
            assert dataset.decode(said).startswith(f"Nummer {number[1]}:")
        assert not padding[:, -1].all()
        assert not (targets[:, -1] == IGNORED).all()


def test_the_other_direction_swaps_the_sides(files, dataset):
    other = data.load("multi30k", data_dir=files, vocab_size=300, direction="de-en")
    there, back = next(dataset.eval_batches(9)), next(other.eval_batches(9))
    assert other.sentences("val") == dataset.sentences("val")[::-1]
    assert other.decode(back.inputs[0]) == dataset.sentences("val")[1][0]
    assert dataset.decode(there.inputs[0]) == dataset.sentences("val")[0][0]


@pytest.mark.parametrize("batch_size", [1, 5])
def test_an_epoch_has_every_pair_once(dataset, batch_size):
    n = dataset.epoch_size("train")
    pools = -(-n // (POOL * batch_size)) * n  # so many pools hold a whole number of epochs
    pools = next(p for p in range(1, pools + 1) if p * POOL * batch_size % n == 0)
    seen = Counter()
    for step in range(pools * POOL):
        batch = dataset.batch("train", step=step, batch_size=batch_size, seed=5)
        seen.update(dataset.decode(row) for row in batch.inputs)
    assert len(seen) == n
    assert set(seen.values()) == {pools * POOL * batch_size // n}


def test_a_batch_is_a_pure_function_of_its_arguments(dataset):
    first = dataset.batch("train", step=3, batch_size=4, seed=1)
    dataset.batch("train", step=70, batch_size=4, seed=1)
    assert all(map(torch.equal, first[:3], dataset.batch("train", step=3, batch_size=4, seed=1)))
    others = [
        dataset.batch("train", step=s, batch_size=4, seed=seed) for s, seed in [(4, 1), (3, 2), (67, 1)]
    ]
    assert not any(torch.equal(first.inputs, other.inputs) for other in others)


def test_batches_hold_pairs_of_about_one_length(dataset):
    batches = [dataset.batch("train", step=step, batch_size=4, seed=0) for step in range(POOL)]
    spread = [(b.targets != IGNORED).sum(1).float().std(correction=0).item() for b in batches]
    lengths = [float((b.targets != IGNORED).sum(1)[0]) for b in batches]
    assert sum(spread) / POOL < 0.3 * torch.tensor(lengths).std().item()
    assert lengths != sorted(lengths)  # and the batches are shuffled


def test_evaluation_has_every_pair_once_in_order(dataset):
    batches = list(dataset.eval_batches(4))
    assert [len(batch.inputs) for batch in batches] == [4, 4, 1]
    texts = [dataset.decode(row) for batch in batches for row in batch.inputs]
    assert texts == dataset.sentences("val")[0]


def test_long_pairs_are_left_out_of_training_only(files, dataset):
    longest = max(max(map(len, pair)) for pair in dataset._pairs["train"])
    whole = data.load("multi30k", data_dir=files, vocab_size=300, length=longest)
    assert whole.epoch_size("train") == dataset.epoch_size("train")
    short = data.load("multi30k", data_dir=files, vocab_size=300, length=longest - 1)
    assert 0 < short.epoch_size("train") < dataset.epoch_size("train")
    assert short.epoch_size("val") == dataset.epoch_size("val")


def test_learned_positions_suffice_for_validation(files):
    options = [f"data.data_dir={files}", "data.vocab_size=300", "data.length=24", "model.positions=learned"]
    settings = ["data.name=multi30k", f"run_dir={files / 'run'}", *options]
    run = run_config.resolve(run_config.read(None, settings))
    lengths = [x.shape[1] for b in run.dataset.eval_batches(9) for x in (b.inputs, b.targets)]
    assert run.model.max_length == max(lengths) > 24
    with pytest.raises(ValueError, match=f"has 24 positions, but must have at least {max(lengths)}"):
        run_config.resolve(run_config.read(None, [*settings, "model.max_length=24"]))


@pytest.mark.parametrize("n", [2, 4])
def test_pairs_are_joined_in_order_with_the_same_ids(files, dataset, n):
    longer = data.load("multi30k", data_dir=files, vocab_size=300, joined=n)
    assert longer.pieces.to_json() == dataset.pieces.to_json()
    for part in PARTS[:3]:
        for single, joined in zip(dataset.sentences(part), longer.sentences(part), strict=True):
            assert len(joined) == len(single) // n
            assert " ".join(joined) == " ".join(single[: len(joined) * n])
    sources, targets = longer.sentences("val")
    batch = next(longer.eval_batches(9))
    assert [longer.decode(row) for row in batch.inputs] == sources
    assert [longer.decode(row[row != IGNORED]) for row in batch.targets] == targets
    assert longer.epoch_size("train") == dataset.epoch_size("train") // n


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "fr-en"}, "direction is 'fr-en', but must be one of 'en-de', 'de-en'"),
        ({"vocab_size": 256}, "vocab_size is 256, but must be an integer of at least 257"),
        ({"joined": 0}, "joined is 0, but must be an integer of at least 1"),
        ({"joined": 10}, "joined is 10, but val has only 9 sentences"),
        ({"length": 1}, "length is 1, but must be an integer of at least 2"),
        ({"length": 2}, "length is 2, but every training pair has more tokens"),
        ({"lenght": 2}, "'lenght' is not an option of data set multi30k, which takes direction, vocab_size"),
    ],
)
def test_wrong_options_are_named(files, options, message):
    with pytest.raises(ValueError, match=message):
        data.load("multi30k", data_dir=files, **options)


def test_an_unknown_part_lists_the_known_ones(dataset):
    assert len(dataset.sentences("test_2017_mscoco")[1]) == 2
    with pytest.raises(ValueError, match="part is 'test', but the parts are train, val, test_2016_flickr"):
        dataset.sentences("test")


def test_a_missing_file_says_where_to_get_it(files):
    (files / "multi30k" / "val.de.gz").unlink()
    with pytest.raises(ValueError, match=r"val\.de\.gz is neither at .* from https://raw\.githubusercontent"):
        data.load("multi30k", data_dir=files)


def test_a_changed_file_is_refused(files):
    (files / "multi30k" / "val.de.gz").write_bytes(gzip.compress(b"Hallo.\n" * 9))
    with pytest.raises(ValueError, match=r"val\.de\.gz is corrupt: its content has the sha256"):
        data.load("multi30k", data_dir=files)


@pytest.mark.parametrize("real_data", ["multi30k"], indirect=True)
def test_the_real_files(real_data):
    real = {part: multi30k.read_sentences(f"{part}.en", real_data) for part in PARTS}
    assert [len(lines) for lines in real.values()] == [29_000, 1_014, 1_000, 1_000, 461]
    assert real["train"][0] == "Two young, White males are outside near many bushes."
    for part in PARTS:
        assert len(multi30k.read_sentences(f"{part}.de", real_data)) == len(real[part])

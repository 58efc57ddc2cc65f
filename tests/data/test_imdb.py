"""The reviews are read as published, cut and padded, and anything else is refused."""

from itertools import pairwise

import pytest
import torch
from published import REVIEWS, imdb_archive, write_imdb

from unrolled.cli import run_config
from unrolled.data.imdb import ImdbDataset, read_reviews
from unrolled.models import Encoder, EncoderConfig
from unrolled.training import TrainConfig, dry_run, train


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return write_imdb(tmp_path, monkeypatch)


@pytest.mark.parametrize("mode", ["w:xz", "w:gz", "w"])
def test_reviews_are_read_whatever_compressed_them_and_in_whatever_order(folder, mode):
    backwards = dict(reversed(REVIEWS.items()))
    reviews = read_reviews(imdb_archive(backwards, mode))
    assert [label for label, _ in reviews["train"]] == [0, 0, 0, 1, 1, 1]
    assert reviews["val"][4] == (1, b"test pos 1 " * 3)


def test_a_batch_is_cut_padded_and_labelled(folder):
    dataset = ImdbDataset(length=20, data_dir=folder)
    batch = dataset.batch("train", step=0, batch_size=6, seed=0)
    assert batch.inputs.shape == batch.key_padding_mask.shape == (6, 20)
    found = {
        (bytes(row[~padding].tolist()), int(label))
        for row, padding, label in zip(batch.inputs, batch.key_padding_mask, batch.targets, strict=True)
    }
    expected = {(text[:20], int("/pos/" in name)) for name, text in REVIEWS.items() if "/train/" in name}
    assert found == expected
    assert not batch.inputs[batch.key_padding_mask].any()


def test_an_empty_review_has_ids_too(folder):
    dataset = ImdbDataset(deleted=0.999, data_dir=folder)
    inputs = [batch.inputs for batch in dataset.eval_batches(1)]
    assert (1, 0) in [x.shape for x in inputs]
    assert {x.dtype for x in inputs} == {torch.int64}


def test_words_are_known_by_how_often_they_occur(folder):
    dataset = ImdbDataset(level="words", length=8, data_dir=folder)
    assert dataset.vocab_size == 7  # "train", "neg", "pos", three digits, and any other
    assert ImdbDataset(level="words", length=8, vocab_size=3, data_dir=folder).vocab_size == 3
    vocabulary = dataset.vocabulary
    batch = dataset.batch("train", step=0, batch_size=6, seed=0)
    assert batch.inputs.shape == (6, 8)
    found = {
        vocabulary.decode(row[~padding])
        for row, padding in zip(batch.inputs, batch.key_padding_mask, strict=True)
    }
    assert found == {
        " ".join(text.decode().split()[:8]) for name, text in REVIEWS.items() if "/train/" in name
    }
    (words, *_) = dataset.eval_batches(1)
    assert vocabulary.decode(words.inputs[0]).split()[0] == "<unk>"  # "test" is not in the training reviews


def test_there_are_no_more_reviews_than_there_are(folder):
    with pytest.raises(ValueError, match="val_size is 25,001, but must be at most 25,000"):
        ImdbDataset(val_size=25_001, data_dir=folder)


def test_bytes_have_no_other_number_of_ids(folder):
    assert ImdbDataset(vocab_size=256, data_dir=folder).vocab_size == 256
    with pytest.raises(ValueError, match="vocab_size is 300, but must be left out with level='bytes'"):
        ImdbDataset(vocab_size=300, data_dir=folder)


def test_the_validation_order_is_mixed_and_never_changes(folder):
    first, second = (
        [batch.targets for batch in ImdbDataset(data_dir=folder).eval_batches(4)] for _ in range(2)
    )
    assert [len(labels) for labels in first] == [4, 2]
    order = torch.cat(first).tolist()
    assert order == torch.cat(second).tolist()
    assert sorted(order) == [0, 0, 0, 1, 1, 1] != order


def test_an_encoder_trains_on_them(folder, tmp_path):
    dataset = ImdbDataset(length=16, data_dir=folder)
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(256, n_classes=2, d_model=16, n_layers=1, n_heads=2, max_length=16))
    config = TrainConfig(steps=3, batch_size=4, eval_every=3)
    assert dry_run(model, dataset, config).tokens == 4  # a label for each review
    result = train(model, dataset, config, tmp_path / "run", progress=False)
    assert result.steps == 3
    assert result.last_val < 1.0


def test_a_run_on_them_has_an_encoder(folder):
    settings = {"data": {"name": "imdb", "data_dir": str(folder)}, "run_dir": "runs/x"}
    run = run_config.resolve(settings | {"model": {"n_layers": 1}})
    assert isinstance(run.model, EncoderConfig)
    assert (run.model.n_classes, run.model.vocab_size, run.model.max_length) == (2, 256, 1024)
    with pytest.raises(ValueError, match=r"model\.n_classes is 1, but must be at least 2 for the data set"):
        run_config.resolve(settings | {"model": {"n_classes": 1}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            imdb_archive(REVIEWS | {"aclImdb/test/pos/1_9.txt": b"!"}),
            "its 12 labelled reviews have the sha256",
        ),
        (b"no archive", "it is not a tar archive"),
        (imdb_archive(REVIEWS)[:-60], "it is not a tar archive"),
    ],
    ids=["changed", "no archive", "cut short"],
)
def test_other_reviews_are_refused(folder, content, message):
    (folder / "imdb/aclImdb_labelled.tar.xz").write_bytes(content)
    with pytest.raises(ValueError, match=f"is corrupt: {message}"):
        ImdbDataset(data_dir=folder)


def test_a_length_of_0_is_refused(folder):
    with pytest.raises(ValueError, match="length is 0, but must be an integer of at least 1"):
        ImdbDataset(length=0, data_dir=folder)


def test_words_are_left_out_of_validation_reviews_only(folder):
    whole, cut = (ImdbDataset(data_dir=folder, deleted=x) for x in (0.0, 0.5))
    for split in ("train", "val"):
        pairs = list(zip(texts(whole, split), texts(cut, split), strict=True))
        assert all(is_part(shorter, longer) for longer, shorter in pairs)
        assert (sum(map(len, (x for x, _ in pairs))) > sum(map(len, (x for _, x in pairs)))) == (
            split == "val"
        )
    assert texts(cut, "val") == texts(ImdbDataset(data_dir=folder, deleted=0.5), "val")


def test_words_of_the_same_review_are_put_in(folder):
    whole, longer = (ImdbDataset(data_dir=folder, inserted=x) for x in (0.0, 0.5))
    pairs = list(zip(texts(whole, "val"), texts(longer, "val"), strict=True))
    assert all(is_part(before, after) and set(before) == set(after) for before, after in pairs)
    assert any(before != after for before, after in pairs)
    assert texts(whole, "train") == texts(longer, "train")


def test_the_share_of_words_is_what_was_asked_for(folder):
    dataset = ImdbDataset(data_dir=folder, deleted=0.2, inserted=0.3)
    dataset._reviews["val"] = [(0, b"word " * 20_000)]
    assert len(dataset._edited(0)[1].split()) == pytest.approx(20_000 * 0.8 * 1.3, rel=0.02)


def test_the_first_reviews_of_the_order_are_validated_on(folder):
    assert (
        texts(ImdbDataset(data_dir=folder, val_size=4), "val")
        == texts(ImdbDataset(data_dir=folder), "val")[:4]
    )


def texts(dataset, split):
    """Return the words of every review of a split."""
    return [text.split(b" ") for _, text in dataset._reviews[split]]


def is_part(shorter, longer):
    """Return whether the words of one text come in this order in another."""
    words = iter(longer)
    return all(word in words for word in shorter)


def test_words_are_put_in_at_random(folder):
    dataset = ImdbDataset(data_dir=folder, inserted=0.5)
    words = [b"w%d" % i for i in range(400)]
    dataset._reviews["val"] = [(0, b" ".join(words))] * 2
    first, second = (dataset._edited(i)[1].split(b" ") for i in range(2))
    assert first != second  # each review is changed in its own way
    assert sum(a == b for a, b in pairwise(first)) < 10
    assert {first.count(word) for word in words} >= {1, 2, 3}

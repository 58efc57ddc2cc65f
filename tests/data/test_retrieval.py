import numpy as np
import pytest
import torch

from unrolled.data import retrieval
from unrolled.data.retrieval import SEPARATOR, RetrievalDataset, partners


@pytest.fixture
def reviews(monkeypatch):
    """Reviews of one letter each, the first half in lower case."""
    texts = [(chr(97 + i) * (i + 3) + chr(65 + i) * (i + 3)).encode() for i in range(11)]
    found = {"train": [(0, text) for text in texts], "val": [(1, text) for text in texts[:6]]}
    monkeypatch.setattr(retrieval, "load_published", lambda paths, url, parse, data_dir: found)
    return texts


def test_halves_of_one_review_are_found_and_others_are_not(reviews):
    data = RetrievalDataset(text_length=7)
    assert data.length == 15
    labels, heads, tails = [], [], []
    for start in range(2):
        batch = data.batch("train", step=start, batch_size=11, seed=0)
        for ids, hidden, label in zip(batch.inputs, batch.key_padding_mask, batch.targets, strict=True):
            head, tail = bytes(x % 256 for x in ids[~hidden].tolist()).split(b"\0")
            assert ids[len(head)] == SEPARATOR
            assert (head.decode().upper()[0] == tail.decode()[0]) == bool(label)
            assert len(head) == len(tail) == min(7, ord(head[:1]) - 94, ord(tail[:1]) - 62)
            assert head.islower()
            assert tail.isupper()
            labels.append(int(label))
            heads.append(head[0])
            tails.append(tail[0])
    assert sum(labels) == 12  # 6 of 11 in an epoch
    assert len(set(heads)) == len(set(tails)) == 11  # each half once in an epoch


@pytest.mark.parametrize("count", [2, 3, 25])
def test_partners_are_a_permutation_with_half_at_their_place(count):
    lengths = np.arange(count)
    own, partner = partners(lengths, "train")
    assert sorted(own) == sorted(partner) == list(range(count))
    if count > 3:
        assert (own == partner).sum() == count - count // 2
    assert not np.array_equal(own, partners(lengths, "val")[0]) or count == 2


def test_another_review_is_the_next_longer_one():
    own, partner = partners(lengths := np.arange(100) ** 2, "train")
    others = sorted((lengths[a], lengths[b]) for a, b in zip(own, partner, strict=True) if a != b)
    assert [b for _, b in others] == [a for a, _ in others[1:] + others[:1]]


@pytest.mark.parametrize("real_data", ["imdb"], indirect=True)
def test_the_real_reviews(real_data):
    data = RetrievalDataset(text_length=64, data_dir=real_data)
    assert data.epoch_size("train") == data.epoch_size("val") == 25_000
    batch = next(iter(data.eval_batches(2_000)))
    assert batch.inputs.shape == (2_000, 129)
    assert torch.all((batch.inputs == SEPARATOR).sum(1) == 1)
    assert 900 < int(batch.targets.sum()) < 1_100


@pytest.mark.parametrize("real_data", ["imdb"], indirect=True)
def test_lengths_do_not_give_the_label_away(real_data):
    data = RetrievalDataset(text_length=2_000, data_dir=real_data)
    batch = data.batch("val", step=0, batch_size=4_000, seed=0)
    lengths = (~batch.key_padding_mask).sum(1)
    assert (lengths % 2 == 1).all()  # two equal texts and the separator
    assert torch.equal((batch.inputs == SEPARATOR).int().argmax(1), lengths // 2)
    same, other = lengths[batch.targets == 1].double(), lengths[batch.targets == 0].double()
    assert abs(same.mean() - other.mean()) < 4 * (same.var() / len(same) + other.var() / len(other)) ** 0.5


def test_texts_are_read_next_to_the_middle_of_their_review(monkeypatch):
    texts = [(0, b"abcdefghij")] * 4
    monkeypatch.setattr(retrieval, "load_published", lambda *_: {"train": texts, "val": texts})
    batch = RetrievalDataset(text_length=2).batch("train", step=0, batch_size=1, seed=0)
    assert batch.inputs.tolist() == [[*b"de", SEPARATOR, *b"fg"]]

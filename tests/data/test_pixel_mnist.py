"""Images of MNIST as sequences of pixels with the digit as their label, in order and permuted."""

import numpy as np
import pytest
import torch
from published import Examples, idx_labels, write_mnist

from unrolled import data
from unrolled.data.mnist import parse_idx_labels


@pytest.fixture
def small(tmp_path, monkeypatch) -> Examples:
    return write_mnist(tmp_path, monkeypatch)


def test_the_pixels_come_row_by_row_with_the_digit(small, tmp_path):
    dataset = data.load("pixel_mnist", data_dir=tmp_path)
    assert (dataset.task, dataset.vocab_size, dataset.length, dataset.n_classes) == ("labels", 256, 784, 10)
    (batch,) = dataset.eval_batches(10)
    images, labels = small["val"]
    assert np.array_equal(batch.inputs.view(3, 28, 28).numpy(), images)
    assert np.array_equal(batch.targets.numpy(), labels)
    assert dataset.epoch_size("train") == 7


def test_one_order_permutes_every_image(small, tmp_path):
    plain, permuted = (data.load("pixel_mnist", data_dir=tmp_path, permuted=x) for x in (False, True))
    before, after = (
        torch.cat(
            [next(iter(x.eval_batches(3))).inputs, x.batch("train", step=0, batch_size=7, seed=0).inputs]
        )
        for x in (plain, permuted)
    )
    assert not torch.equal(before, after)
    columns = {tuple(x.tolist()): i for i, x in enumerate(before.T)}
    order = [columns[tuple(x.tolist())] for x in after.T]
    assert sorted(order) == list(range(784))
    again = data.load("pixel_mnist", data_dir=tmp_path, permuted=True)
    assert torch.equal(after[:3], next(iter(again.eval_batches(3))).inputs)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes, fewer than its header of 8"),
        (idx_labels(np.zeros(2), magic=0x0803), "starts with 0x00000803, but labels start with 0x00000801"),
        (idx_labels(np.zeros(2))[:-1], r"1 labels, but its header \(2,\) announces 2"),
    ],
)
def test_labels_in_another_form_are_refused(content, message):
    with pytest.raises(ValueError, match=message):
        parse_idx_labels(content)

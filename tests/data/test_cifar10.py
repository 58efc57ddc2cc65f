import numpy as np
import pytest
import torch
from published import cifar10_subset, write_cifar10

from unrolled import data
from unrolled.data import cifar10
from unrolled.data.cifar10 import Cifar10Dataset, read_subset


@pytest.fixture
def small(tmp_path, monkeypatch) -> dict[str, np.ndarray]:
    return write_cifar10(tmp_path, monkeypatch)


def test_colours_of_a_pixel_follow_each_other(small, tmp_path):
    dataset = data.load("cifar10", data_dir=tmp_path)
    assert (dataset.vocab_size, dataset.shape, dataset.length) == (256, (32, 32, 3), 3072)
    train = np.concatenate([small[f"data_batch_{i}"] for i in range(1, 6)])
    assert np.array_equal(dataset.images("train").numpy(), train)
    (batch,) = dataset.eval_batches(10)
    assert np.array_equal(batch.targets.view(2, 32, 32, 3).numpy(), small["test_batch"])
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert torch.all(batch.inputs[:, 0] == 256)
    assert dataset.vocabulary.shape == [32, 32, 3]


def test_classes_are_told_from_grey_images(small, tmp_path):
    dataset = data.load("grey_cifar10", data_dir=tmp_path)
    (batch,) = dataset.eval_batches(10)
    assert batch.targets.tolist() == [ord("h") % 10] * 2
    weighed = (small["test_batch"] * np.array([0.2989, 0.587, 0.114])).sum(-1)
    assert np.abs(batch.inputs.view(2, 32, 32).numpy() - weighed).max() <= 0.5 + 1e-4
    train = dataset.batch("train", step=0, batch_size=10, seed=0)
    assert sorted(train.targets.tolist()) == sorted(2 * [ord(i) % 10 for i in "12345"])


def test_another_archive_is_refused(small, tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz is corrupt: its content has the sha256"):
        Cifar10Dataset(data_dir=tmp_path)


def test_a_subset_must_be_there(tmp_path):
    with pytest.raises(ValueError, match=r"subset is True, but .*cifar10_subset.npz is missing"):
        Cifar10Dataset(subset=True, data_dir=tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (None, "is corrupt"),
        (
            {"x_train": np.zeros((1, 32, 32, 3), np.uint8)},
            "is corrupt: 'y_train is not a file in the archive'",
        ),
        (cifar10_subset(np.zeros((1, 32, 32, 3))), "images are float64"),
        (cifar10_subset(np.zeros((1, 3, 32, 32), np.uint8)), r"uint8 \[1, 3, 32, 32\]"),
        (cifar10_subset(np.zeros((2, 32, 32, 3), np.uint8)), r"labels \[1\]"),
    ],
)
def test_another_file_is_no_subset(tmp_path, arrays, message):
    path = tmp_path / "subset.npz"
    path.write_bytes(b"no arrays") if arrays is None else np.savez(path, **arrays)
    with pytest.raises(ValueError, match=message):
        read_subset(path)


def test_a_damaged_subset_is_named(tmp_path):
    path = tmp_path / "subset.npz"
    rng = np.random.default_rng(0)
    np.savez_compressed(path, **cifar10_subset(rng.integers(4, size=(9, 32, 32, 3), dtype=np.uint8)))
    content = bytearray(path.read_bytes())
    content[400:900] = b"U" * 500
    np.save(tmp_path / "array.npy", np.zeros(3))
    for damaged in (bytes(content), (tmp_path / "array.npy").read_bytes()):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"subset.npz is corrupt: "):
            read_subset(path)


@pytest.mark.parametrize("real_data", ["cifar10"], indirect=True)
def test_the_real_subset(real_data):
    dataset = Cifar10Dataset(subset=True, data_dir=real_data)
    train = dataset.images("train")
    assert (train.shape, train.dtype) == ((5_000, 32, 32, 3), torch.uint8)
    assert dataset.images("val").shape == (1_000, 32, 32, 3)
    mean = train.double().mean(dim=(0, 1, 2)) / 255  # of all 50,000 it is .4914, .4822, .4465
    assert mean.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.003)
    classes = data.load("grey_cifar10", subset=True, data_dir=real_data).batch(
        "train", step=0, batch_size=5_000, seed=0
    )
    assert torch.bincount(classes.targets).tolist() == [500] * 10

import gzip

import numpy as np
import pytest
import torch
from published import idx_images, write_mnist

from unrolled import data
from unrolled.data import mnist
from unrolled.data.mnist import MnistDataset, parse_idx_images


@pytest.fixture
def small(tmp_path, monkeypatch) -> dict[str, np.ndarray]:
    """The images of a small MNIST in `tmp_path`."""
    return {split: images for split, (images, _) in write_mnist(tmp_path, monkeypatch).items()}


def test_the_files_are_read_pixel_for_pixel(small, tmp_path):
    dataset = data.load("mnist", data_dir=tmp_path)
    assert (dataset.vocab_size, dataset.shape, dataset.length) == (256, (28, 28), 784)
    assert dataset.start_token
    for split in ("train", "val"):
        assert np.array_equal(dataset.images(split).numpy(), small[split])
    (batch,) = dataset.eval_batches(10)
    assert np.array_equal(batch.targets.view(3, 28, 28).numpy(), small["val"])
    assert torch.all(batch.inputs[:, 0] == 256)


def test_the_environment_names_the_folder(small, tmp_path, monkeypatch):
    monkeypatch.setenv("UNROLLED_DATA", str(tmp_path))
    assert MnistDataset().epoch_size("train") == 7


def test_a_file_with_other_pixels_is_refused(small, tmp_path):
    path = tmp_path / mnist.FILES["val"].path
    path.write_bytes(gzip.compress(idx_images(255 - small["val"])))
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte.gz is corrupt"):
        MnistDataset(tmp_path)


def test_missing_files_are_named_with_their_address(tmp_path):
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz is neither at .* https://.*/train-ima"):
        MnistDataset(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes, fewer than its header of 16"),
        (idx_images(np.zeros((2, 3, 3)))[:15], "15 bytes, fewer than its header of 16"),
        (
            idx_images(np.zeros((2, 3, 3)), magic=0x0801),
            "starts with 0x00000801, but images start with 0x00000803",
        ),
        (idx_images(np.zeros((2, 3, 3)))[:-1], r"17 pixels, but its header \(2, 3, 3\) announces 18"),
        (idx_images(np.zeros((2, 3, 3))) + b"\0", r"19 pixels, but its header \(2, 3, 3\) announces 18"),
    ],
)
def test_content_in_another_format_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        parse_idx_images(content)


@pytest.mark.parametrize("real_data", ["mnist"], indirect=True)
def test_the_real_files(real_data):
    dataset = MnistDataset(real_data)
    train = dataset.images("train")
    assert (train.shape, train.dtype) == ((60_000, 28, 28), torch.uint8)
    assert dataset.images("val").shape == (10_000, 28, 28)
    assert train.sum(dtype=torch.int64).item() / train.numel() / 255 == pytest.approx(0.1307, abs=5e-5)

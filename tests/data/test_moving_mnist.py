"""Moving MNIST: what the videos and masks are, recomputed pixel by pixel."""

import numpy as np
import pytest
import torch

from unrolled import data
from unrolled.contract import IGNORED

from .test_mnist import small  # noqa: F401  # a fixture


@pytest.fixture
def made(small, tmp_path):  # noqa: F811
    return lambda **options: data.load("moving_mnist", **{"data_dir": tmp_path, "val_size": 6} | options)


def frames_of(dataset, batch):
    """Levels, the given mask and the masks to predict: [B, frames, size, size] each."""
    pixels, given = batch.inputs.split(dataset.patch**2, dim=-1)
    return [dataset.video(x).numpy() for x in (pixels, given, batch.targets)]


def test_one_digit_is_a_shifted_image_and_its_mask(made, small):  # noqa: F811
    dataset = made(n_digits=1, size=40, patch=4)
    video, given, asked = frames_of(dataset, dataset.batch("train", step=0, batch_size=5, seed=0))
    assert np.all(asked[:, 0] == IGNORED)
    assert np.all(given[:, 1:] == 0)
    assert np.array_equal(given[:, 0], video[:, 0] >= 128 / 255)
    assert np.array_equal(asked[:, 1:] == 1, video[:, 1:] >= 128 / 255)
    images = [x / np.float32(255) for x in small["train"].astype(np.float32)]
    corners = [(y, x) for y in range(13) for x in range(13)]
    for row in video:
        places = [
            next(
                (n, y, x)
                for y, x in corners
                for n, image in enumerate(images)
                if np.array_equal(frame[y : y + 28, x : x + 28], image)
            )
            for frame in row
        ]
        assert len({n for n, _, _ in places}) == 1, "the digit changed"
        steps = np.abs(np.diff([place[1:] for place in places], axis=0))
        assert steps.max() <= 6
        assert steps.sum() > 0


def test_where_digits_overlap_the_brighter_pixel_is_seen(made):
    dataset = made(size=28, patch=7, frames=2)
    alone = made(size=28, patch=7, frames=2, n_digits=1)
    video, given, _ = frames_of(dataset, dataset.batch("val", step=0, batch_size=6, seed=0))
    single, _, _ = frames_of(alone, alone.batch("val", step=0, batch_size=6, seed=0))
    assert np.array_equal(video[:, 0], video[:, 1])  # there is no room to move
    assert np.all(video[:, 0][given[:, 0] == 1] >= 128 / 255)
    assert video.mean() > single.mean() + 0.1


def test_patches_are_in_the_order_of_frames_rows_and_columns(made):
    dataset = made(frames=3, size=32, patch=8)
    assert (dataset.length, dataset.input_size, dataset.output_size) == (48, 128, 64)
    batch = dataset.batch("train", step=1, batch_size=2, seed=0)
    assert batch.inputs.shape == (2, 48, 128)
    assert batch.targets.shape == (2, 48, 64)
    video = dataset.video(batch.inputs[..., :64])
    assert torch.equal(batch.inputs[1, 16 + 4 * 2 + 3, :64].view(8, 8), video[1, 1, 16:24, 24:32])


def test_batches_are_a_function_of_seed_and_step(made):
    a, b = made(), made()
    for step, seed in ((0, 0), (0, 1), (1, 0)):
        assert torch.equal(*(x.batch("train", step=step, batch_size=2, seed=seed).inputs for x in (a, b)))
    assert not torch.equal(*(a.batch("train", step=step, batch_size=2, seed=0).inputs for step in (0, 1)))
    assert sum(len(x.inputs) for x in a.eval_batches(4)) == 6


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"frames": 1}, "frames is 1, but must be an integer of at least 2"),
        ({"size": 27}, "size is 27, but must be an integer of at least 28"),
        ({"patch": 7}, "patch is 7, but must divide size = 64"),
    ],
)
def test_impossible_options(made, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        made(**options)


def test_validation_videos_are_of_test_images(made, small):  # noqa: F811
    dataset = made(n_digits=1, size=28, patch=7, frames=2)
    for split, batch in {
        "train": dataset.batch("train", step=0, batch_size=6, seed=0),
        "val": next(dataset.eval_batches(6)),
    }.items():
        video, *_ = frames_of(dataset, batch)
        images = small[split].astype(np.float32) / np.float32(255)
        assert all((frame == images).all((1, 2)).any() for frame in video[:, 0])


def test_digits_have_different_speeds(made):
    dataset = made()
    dataset.size = 2_000  # so large that few digits bounce; images of this size would take half a minute
    places = dataset._paths(np.random.default_rng(0), 500)
    speeds = np.hypot(*np.moveaxis(places[:, :, -1] - places[:, :, 0], -1, 0)).flatten() / 7
    assert np.quantile(speeds, [0.1, 0.5, 0.9]) == pytest.approx([2.3, 3.5, 4.7], abs=0.15)
    assert np.quantile(speeds, 0.01) > 1.8  # a few bounce
    assert speeds.max() < 5.2

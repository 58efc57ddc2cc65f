"""Sheets of images: which image is where, in grey and in colour."""

from pathlib import Path

import numpy as np
import pytest
import torch
from commands import error, works

from unrolled.cli import _sheets
from unrolled.data import load

SIZE = 112 // 8  # what a pixel of an image 8 pixels high becomes


def draw(prompts, count, *, num_samples, on_token):
    """Continue each prompt by 7, by 8 in the second sample and so on."""
    for row in range(len(prompts) * num_samples):
        on_token(row, 7)
    return [torch.full((count,), 7 + i % num_samples) for i in range(len(prompts) * num_samples)]


def test_completions_stand_between_what_is_given_and_the_original():
    originals = torch.randint(5, (3, 8, 8, 3), dtype=torch.uint8)
    found = _sheets.completed(draw, originals, rows=2, count=2)
    assert found.shape == (3, 4, 8, 8, 3)
    assert (found[:, :, :2] == originals[:, None, :2].numpy()).all()
    assert (found[:, 0, 2:] == -1).all()
    assert (found[:, 1, 2:] == 7).all()
    assert (found[:, 2, 2:] == 8).all()
    assert (found[:, 3] == originals.numpy()).all()


@pytest.mark.parametrize("count", [0, -1])
def test_a_sheet_has_at_least_one_image(count):
    with pytest.raises(ValueError, match=f"--num-samples is {count}, but must be at least 1"):
        _sheets.drawn(draw, [8, 8], count)


@pytest.mark.parametrize("rows", [0, 8, -1])
def test_some_rows_are_given_and_some_drawn(rows):
    with pytest.raises(ValueError, match=rf"--complete is {rows}, but must be from 1 to 7"):
        _sheets.completed(draw, torch.zeros(1, 8, 8, dtype=torch.uint8), rows, 1)


@pytest.mark.parametrize("shape", [(8, 6), (8, 6, 3)])
def test_a_sheet_shows_levels_as_they_are(tmp_path, shape):
    imread = pytest.importorskip("matplotlib.image").imread
    images = np.random.default_rng(0).integers(18, size=(2, 3, *shape)) - 1
    _sheets.write(images, 17, tmp_path / "sheet.png")
    found = (imread(tmp_path / "sheet.png")[::SIZE, ::SIZE, :3] * 255).round().astype(int)
    assert found.shape == (2 * 9, 3 * 7, 3)
    lines = found.reshape(2, 9, 3, 7, 3).swapaxes(1, 2)
    assert (lines[:, :, 8] == 85).all()
    assert (lines[:, :, :, 6] == 85).all()
    expected = images if len(shape) == 3 else images[..., None].repeat(3, -1)
    assert (lines[:, :, :8, :6] == np.where(expected < 0, 85, expected * 255 // 16)).all()


def test_images_of_the_validation_split_are_completed(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    imread = pytest.importorskip("matplotlib.image").imread
    run_dir, sheet = tmp_path / "run", tmp_path / "sheet.png"
    works("train", "data.name=digits", "model.d_model=8", "model.n_layers=1", "model.n_heads=1",
          "train.steps=1", "train.eval_batches=1", f"run_dir={run_dir}")  # fmt: skip
    said = works("generate", run_dir, "--complete", 6, "--num-samples", 2, "--out", sheet).stderr
    assert f"8 images, each completed 2 times, in {sheet}" in said
    found = (imread(sheet)[::SIZE, ::SIZE, 0] * 255).round().reshape(8, 9, 4, 9).swapaxes(1, 2)
    real = load("digits").images("val")[:8].numpy().astype(int) * 255 // 16  # type: ignore[attr-defined]
    assert (found[:, 3, :8, :8] == real).all()
    assert (found[:, :, :6, :8] == real[:, None, :6]).all()
    assert "--complete is 8, but must be from 1 to 7" in error("generate", run_dir, "--complete", 8)
    assert "--data-dir is for --complete" in error("generate", run_dir, "--data-dir", tmp_path)

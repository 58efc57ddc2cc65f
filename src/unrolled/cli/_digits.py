"""The demo of a model of digits: generate new digits, complete partial ones, and describe the results."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unrolled.data.digits import DigitsDataset
from unrolled.generation import generate
from unrolled.models import Decoder
from unrolled.training import TrainConfig, read_log

TEMPERATURE = 1.0


def draw(
    model: Decoder, count: int, shape: tuple[int, int], seed: int, on_pixel: Callable[[], None]
) -> Tensor:
    """Generate digits from the start symbol alone, in one batch: uint8 [count, H, W]."""
    height, width = shape
    drawn = generate(
        model,
        [[]],
        height * width,
        num_samples=count,
        temperature=TEMPERATURE,
        seed=seed,
        on_token=lambda row, level: on_pixel(),
    )
    return torch.stack(drawn).reshape(count, height, width).to(torch.uint8)


def complete(model: Decoder, originals: Tensor, rows_given: int, each: int, seed: int) -> Tensor:
    """Complete images [N, H, W] from their upper rows: uint8 [N, each, H, W]."""
    n, height, width = originals.shape
    given = originals[:, :rows_given].flatten(1).long()
    drawn = generate(
        model, given, (height - rows_given) * width, num_samples=each, temperature=TEMPERATURE, seed=seed
    )
    whole = torch.cat([given.repeat_interleave(each, dim=0), torch.stack(drawn)], dim=1)
    return whole.reshape(n, each, height, width).to(torch.uint8)


def describe_samples(samples: Tensor, dataset: DigitsDataset) -> dict[str, Any]:
    """Describe samples [N, H, W], and how far they and real digits are from the training images.

    The distance of an image is the root mean square difference in grey levels from the nearest training
    image. Both distances are medians.
    """
    train = dataset.images("train").flatten(1).double()

    def distances(images: Tensor) -> Tensor:
        nearest: Tensor = torch.cdist(images.flatten(1).double(), train).amin(1)
        return nearest / math.sqrt(train.shape[1])

    count, height, width = samples.shape
    return {
        "count": count,
        "height": height,
        "width": width,
        "levels": dataset.vocab_size,
        "temperature": TEMPERATURE,
        "distance_to_training": distances(samples).median().item(),
        "distance_of_real": distances(dataset.images("val")).median().item(),
        "copies": int((samples.unsqueeze(1) == dataset.images("train")).flatten(2).all(2).any(1).sum()),
    }


def describe_training(run_dir: Path, config: TrainConfig, dataset: DigitsDataset) -> dict[str, Any]:
    """Collect the losses of a run, in bits per pixel, and its settings."""
    log = read_log(run_dir / "log.jsonl")
    train, val = (
        [(line["step"], line["loss"] / math.log(2)) for line in log if line["event"] == event]
        for event in ("train", "eval")
    )
    best_step, best = min(val, key=lambda point: point[1])
    return {
        "config": asdict(config),
        "images": dataset.epoch_size("train"),
        "validation_images": dataset.epoch_size("val"),
        "steps": config.steps,
        "best_step": best_step,
        "best_bits_per_dim": best,
        "uniform_bits_per_dim": math.log2(dataset.vocab_size),
        "train": train,
        "val": val,
    }

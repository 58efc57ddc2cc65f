"""The demo's report: one HTML page that carries its pictures with it."""

import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import MISSING, fields
from html import escape
from importlib import resources
from string import Template
from typing import Any

from unrolled.bench.plots import NAMES
from unrolled.bench.units import brief_time, duration, size
from unrolled.models import DecoderConfig
from unrolled.training import TrainConfig

ALTERNATIVES = {
    "samples": "A sheet of digits drawn by the model",
    "real": "A sheet of real handwritten digits",
    "completions": "Digits, their upper halves, and what the model drew below them",
    "loss": "Training and validation loss against the training step",
    "time": "Time per token against position: flat for linear attention, growing for softmax",
    "memory": "Memory against position: flat for linear attention, growing for softmax",
}
"""The pictures of a report, with the text for those who do not see them."""

KEPT = {"linear": "state", "softmax_cache": "cache", "softmax_recompute": "activations"}
"""What the bytes of each contender hold."""


def build(figures: Mapping[str, Any], pictures: Mapping[str, Mapping[str, bytes]]) -> str:
    """Make the page.

    Args:
        figures: what `figures.json` holds.
        pictures: a PNG file for each of `ALTERNATIVES`, as "light" and as "dark".
    """
    shown = {f"{name}_picture": _picture(pictures[name], alt) for name, alt in ALTERNATIVES.items()}
    tables = {
        "cost_table": _cost_table(figures["cost"]),
        "command": escape(command(figures)),
        "seconds": escape(_seconds(figures["seconds"])),
    }
    template = resources.files("unrolled.cli").joinpath("report.html").read_text(encoding="utf-8")
    sentences = {name: escape(text) for name, text in _values(figures).items()}
    return Template(template).substitute(sentences | shown | tables)


def summary(figures: Mapping[str, Any]) -> str:
    """Say in a few lines what the report says."""
    return Template(
        "$bits bits per pixel on digits not trained on, after $trained of training.\n"
        "A token costs $linear_time_near at position $near and $linear_time_far at position $far with linear "
        "attention,\n$softmax_cache_time_near and $softmax_cache_time_far with softmax and a KV cache.\n"
        "The state is $linear_size_near and $linear_size_far; the cache $softmax_cache_size_near and "
        "$softmax_cache_size_far.\nAll of this took $total."
    ).substitute(_values(figures))


def _values(figures: Mapping[str, Any]) -> dict[str, str]:
    """Give every name that stands in a sentence its text."""
    training, samples, cost, seconds = (figures[k] for k in ("training", "samples", "cost", "seconds"))
    values: dict[str, Any] = {
        **figures["completions"],
        **{name: samples[name] for name in ("count", "height", "width", "levels", "copies")},
        **{name: cost["shape"][name] for name in ("n_layers", "d_model", "n_heads")},
        **{name: cost[name] for name in ("repeats", "window")},
        "folder": figures["folder"],
        "bits": f"{training['best_bits_per_dim']:.3f}",
        "uniform": f"{training['uniform_bits_per_dim']:.2f}",
        "parameters": f"{figures['model']['parameters']:,}",
        "images": f"{training['images']:,}",
        "validation_images": f"{training['validation_images']:,}",
        "steps": f"{training['steps']:,}",
        "best_step": f"{training['best_step']:,}",
        "temperature": f"{samples['temperature']:g}",
        "distance": f"{samples['distance_to_training']:.2f}",
        "distance_of_real": f"{samples['distance_of_real']:.2f}",
        "trained": duration(seconds["training"]),
        "drawn": duration(seconds["drawing"]),
        "total": duration(seconds["total"]),
        **figures["machine"],
    }
    for place, position in zip(("near", "far"), cost["compared_at"], strict=True):
        values[place] = f"{position:,}"
        for name in ("linear", "softmax_cache"):
            (at,) = (c for c in cost["contenders"][name] if c["position"] == position)
            values[f"{name}_time_{place}"] = brief_time(at["seconds"])
            values[f"{name}_size_{place}"] = size(at["nbytes"])
    return {name: str(value) for name, value in values.items()}


def _picture(themes: Mapping[str, bytes], alternative: str) -> str:
    light, dark = (f"data:image/png;base64,{b64encode(themes[name]).decode()}" for name in ("light", "dark"))
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(alternative)}"></picture>'
    )


def _cost_table(cost: Mapping[str, Any]) -> str:
    contenders = {
        name: {c["position"]: (brief_time(c["seconds"]), size(c["nbytes"])) for c in costs}
        for name, costs in cost["contenders"].items()
    }
    names = "".join(f'<th colspan="2">{escape(NAMES[name])}</th>' for name in contenders)
    columns = "".join(f"<th>time per token</th><th>{KEPT[name]}</th>" for name in contenders)
    head = f'<thead><tr><th rowspan="2">position</th>{names}</tr><tr>{columns}</tr></thead>'
    rows = []
    for position in cost["positions"]:
        cells = [cell for costs in contenders.values() for cell in costs.get(position, ("", ""))]
        row = "".join(f"<td>{cell}</td>" for cell in (f"{position:,}", *cells))
        rows.append(f"<tr>{row}</tr>")
    return f'<table class="numbers">{head}<tbody>{"".join(rows)}</tbody></table>'


def command(figures: Mapping[str, Any]) -> str:
    """Return the command that trains this model: what neither is a default nor comes from the data."""
    changed = _changed(DecoderConfig, figures["model"]["config"])
    model = {name: value for name, value in changed.items() if name not in DecoderConfig.from_data()}
    train = _changed(TrainConfig, figures["training"]["config"])
    words = {"model": model, "train": train}
    lines = [
        " ".join(f"{section}.{name}={json.dumps(value)}" for name, value in values.items())
        for section, values in words.items()
    ]
    return " \\\n  ".join(["unrolled train data.name=digits", *lines, "run_dir=runs/digits"])


def _changed(kind: type[Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config that are not the defaults of its fields."""
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(kind)
    }
    return {name: value for name, value in config.items() if value != defaults[name]}


def _seconds(seconds: Mapping[str, float]) -> str:
    parts = (f"{name} {duration(value)}" for name, value in seconds.items() if name != "total")
    return ", ".join(parts)

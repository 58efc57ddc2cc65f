"""The demo's report: one HTML page that carries its pictures with it, made from figures and pictures alone."""

from base64 import b64encode
from collections.abc import Mapping
from html import escape
from importlib import resources
from string import Template
from typing import Any

NAMES = {
    "linear": "linear attention",
    "softmax_cache": "softmax, KV cache",
    "softmax_recompute": "softmax, prefix recomputed",
}
"""How each contender of the measurement is called."""


def build(figures: Mapping[str, Any], pictures: Mapping[str, Mapping[str, bytes]]) -> str:
    """Make the page.

    Args:
        figures: what `figures.json` holds.
        pictures: PNG files "samples", "real", "completions", "loss", "time" and "memory", each as "light"
            and "dark".
    """
    model, training, samples = figures["model"], figures["training"], figures["samples"]
    completions, cost, seconds = figures["completions"], figures["cost"], figures["seconds"]
    best, uniform = training["best_bits_per_pixel"], training["uniform_bits_per_pixel"]
    near, far = cost["compared_at"]
    linear, cache = (_at(cost, name, (near, far)) for name in ("linear", "softmax_cache"))

    lead = (
        f"A transformer with linear attention learned handwritten digits in "
        f"{_duration(seconds['training'])} and drew the ones below pixel by pixel, as a recurrent network. "
        f"It needs {best:.2f} bits per pixel on digits it was not trained on, where guessing takes "
        f"{uniform:.2f}. A token costs {_ms(linear[near])} at position {near:,} and {_ms(linear[far])} at "
        f"position {far:,}; softmax attention with a KV cache takes {_ms(cache[near])} and "
        f"{_ms(cache[far])}. The state to go on from is {_bytes(linear[near]['nbytes'])} and "
        f"{_bytes(linear[far]['nbytes'])}, against {_bytes(cache[near]['nbytes'])} and "
        f"{_bytes(cache[far]['nbytes'])}. All of this took {_duration(seconds['total'])}."
    )
    texts = {
        "lead": lead,
        "samples": (
            f"{samples['count']} digits of {samples['height']} × {samples['width']} pixels and "
            f"{samples['levels']} grey levels, drawn from the start symbol alone at temperature "
            f"{samples['temperature']:g}, all at once, in {samples['seconds']:.1f} s. They are new: the "
            f"training image nearest to one is {samples['distance_to_training']:.1f} grey levels per pixel "
            f"away (root mean square, median), and {samples['distance_of_real']:.1f} away from a real digit "
            f"of the validation set; {samples['copies']} of them equal a training image."
        ),
        "sample_count": samples["count"],
        "completions": (
            f"The model reads the upper {completions['rows_given']} rows of {completions['images']} digits "
            f"that it was not trained on, all in parallel. From the state this leaves, it draws the rest "
            f"{completions['each']} times, one pixel after the other."
        ),
        "training": (
            f"{model['parameters']:,} parameters, {training['images']:,} images, {training['steps']:,} steps in "
            f"{_duration(seconds['training'])}. The weights with the best validation loss, of step "
            f"{training['best_step']:,}, drew this page. They were chosen by the same "
            f"{training['validation_images']} images that measure them, which flatters the figure a little."
        ),
        "cost": (
            f"An untrained decoder with {cost['n_layers']} layers, {cost['d_model']} wide, {cost['n_heads']} "
            f"heads, writes one sequence on {_count(cost['threads'], 'thread')}. Linear attention steps from "
            f"a state of fixed size. Softmax attention steps from a cache of all keys and values so far, or "
            f"keeps nothing and reads the whole prefix again for each token."
        ),
        "time_caption": (
            f"Median of {cost['repeats']} runs that take turns, each of {cost['window']} tokens from the "
            f"position on, or of a single one where the prefix is read again."
        ),
        "memory_caption": (
            "State and cache are counted exactly. Reading the prefix again keeps no state: shown is the peak "
            "of its activations."
        ),
        "more": f"Draw more digits with <code>unrolled generate {escape(figures['folder'])}</code>.",
    }
    alternatives = {
        "samples": f"A sheet of {samples['count']} digits drawn by the model",
        "real": f"A sheet of {samples['count']} real handwritten digits",
        "completions": "Digits, their upper halves, and what the model drew below them",
        "loss": f"Training and validation loss against the step; the best validation loss is {best:.3f}",
        "time": "Time per token against position: flat for linear attention, growing for softmax",
        "memory": "Memory against position: flat for linear attention, growing for softmax",
    }
    shown = {f"{name}_picture": _picture(pictures[name], alt) for name, alt in alternatives.items()}
    tables = {"cost_table": _cost_table(cost), "settings": _settings(figures)}
    template = resources.files("unrolled.cli").joinpath("report.html").read_text(encoding="utf-8")
    return Template(template).substitute(texts | shown | tables)


def _picture(themes: Mapping[str, bytes], alt: str) -> str:
    light, dark = (f"data:image/png;base64,{b64encode(themes[name]).decode()}" for name in ("light", "dark"))
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(alt)}"></picture>'
    )


def _cost_table(cost: Mapping[str, Any]) -> str:
    head = "".join(f'<th class="number" colspan="2">{escape(NAMES[name])}</th>' for name in cost["contenders"])
    rows = []
    for position in cost["positions"]:
        cells = ""
        for name in cost["contenders"]:
            found = _at(cost, name, (position,)).get(position)
            values = (_ms(found), _bytes(found["nbytes"])) if found else ("", "")
            cells += "".join(f'<td class="number">{value}</td>' for value in values)
        rows.append(f'<tr><td class="number">{position:,}</td>{cells}</tr>')
    return f'<table><tr><th class="number">position</th>{head}</tr>{"".join(rows)}</table>'


def _settings(figures: Mapping[str, Any]) -> str:
    groups = {
        "model": figures["model"]["config"],
        "training": figures["training"]["config"],
        "seconds": {name: round(value, 1) for name, value in figures["seconds"].items()},
        "machine": figures["machine"],
    }
    rows = (
        f"<tr><th>{name}</th><td>{escape(', '.join(f'{k} {v}' for k, v in values.items()))}</td></tr>"
        for name, values in groups.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _at(cost: Mapping[str, Any], name: str, positions: tuple[int, ...]) -> dict[int, Mapping[str, Any]]:
    return {c["position"]: c for c in cost["contenders"][name] if c["position"] in positions}


def _ms(cost: Mapping[str, Any]) -> str:
    return f"{float(f'{cost["seconds"] * 1e3:.3g}'):g} ms"


def _bytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return _count(rest, "second")
    return f"{_count(minutes, 'minute')} {rest} s" if rest else _count(minutes, "minute")

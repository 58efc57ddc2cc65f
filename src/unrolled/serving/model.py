"""Open a folder as a model that is served."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

import unrolled
from unrolled.contract import UnsupportedError
from unrolled.data import Vocabulary
from unrolled.decode import Plan, load, load_model, packed_form, plan
from unrolled.decode.packing import LAYOUT, Weights
from unrolled.decode.saving import VERSION, Unfilled
from unrolled.files import file_digest, read_object
from unrolled.folders import CONFIG_FILE, PLAN_FILE, WEIGHTS_FILE
from unrolled.models import Decoder, PerceiverAR
from unrolled.models.language_model import LanguageModel
from unrolled.ops import native
from unrolled.serving.engine import Engine, Limits
from unrolled.serving.runner import PlanRunner, Runner
from unrolled.serving.text import Text, TokenizerText, VocabularyText
from unrolled.serving.unplanned import ModelRunner


@dataclass(frozen=True)
class Served:
    """A model that is served.

    Attributes:
        name: name of the model in requests.
        digest: digest of everything that its states depend on: the config, the weights and their form, the
            layout of states in memory, and the versions.
        created: when its weights were written, in seconds since 1970.
        vocab_size: number of ids.
        start_token: whether every sequence begins with the start symbol, whose id is `vocab_size`.
        n_positions: maximum number of tokens of a sequence; None for any number.
        shape: height and width of the images that the model draws, and then 3 for colour; None for text.
        text: encodes and decodes its ids; None for images.
        engine: the engine that runs the model.
        description: details for people: mechanisms, parameters and the form of the weights.
    """

    name: str
    digest: str
    created: int
    vocab_size: int
    start_token: bool
    n_positions: int | None
    shape: tuple[int, ...] | None
    text: Text | None
    engine: Engine
    description: dict[str, Any] = field(default_factory=dict)


def open_model(
    path: str | Path,
    *,
    name: str | None = None,
    weights: Weights | None = None,
    limits: Limits | None = None,
    deterministic: bool = False,
) -> Served:
    """Open the folder of a model whose state is a recurrence.

    Args:
        path: a run folder, a folder of `unrolled quantize`, or a folder saved by one of the classes for
            transformers in `unrolled.interop.hf`.
        name: name of the model in requests; by default that of the folder.
        weights: the form that the matrices are rounded to; None keeps the form in the folder.
        limits: bounds of the engine.
        deterministic: whether the tokens of a request must not depend, bit for bit, on other requests.

    Raises:
        ValueError: the folder holds no such model, or `limits` has no memory for a state.
        UnsupportedError: the model is not a recurrence, or is a Perceiver AR; or `weights` is given and no
            plan can run the model.
    """
    folder = Path(path)
    of_transformers = "model_type" in read_object(folder / CONFIG_FILE)
    model = _of_transformers(folder) if of_transformers else _model(folder, weights)
    if not isinstance(model, LanguageModel | Plan):
        raise UnsupportedError(f"{folder} holds a model that does not predict the next token from a state")
    if isinstance(model, PerceiverAR):
        raise UnsupportedError(
            f"{folder} holds a Perceiver AR, which must read a prompt in one call, but a server reads it in "
            "parts: use unrolled generate"
        )
    runner = _runner(model, weights, deterministic)
    form = runner.plan.weights if isinstance(runner, PlanRunner) else "model"
    file = _weights_file(folder)
    bounds = limits or Limits()
    if deterministic and not isinstance(runner, PlanRunner):
        # Without a plan, the rounding depends on where a prompt was cut.
        bounds = {**bounds, "prefix_memory": 0}
    digest = _digest(file, form)
    config: Any = model.config
    vocabulary = None if of_transformers else Vocabulary.load(folder)
    if vocabulary is not None:
        vocabulary.check(config.vocab_size)
    shape = None if vocabulary is None else vocabulary.shape
    return Served(
        name=name or folder.resolve().name,
        digest=digest,
        created=int(file.stat().st_mtime),
        vocab_size=config.vocab_size,
        start_token=bool(config.start_token),
        n_positions=runner.n_positions,
        shape=None if shape is None else tuple(shape),
        text=_text(folder, vocabulary),
        engine=Engine(runner, digest=digest, **bounds),
        description=_description(model, form),
    )


def _of_transformers(folder: Path) -> nn.Module:
    from unrolled.interop.hf.convert import load as load_transformers

    loaded = load_transformers(folder)
    if not loaded.config.is_decoder:
        raise UnsupportedError(f"{folder} holds an encoder, which does not predict the next token")
    inner: nn.Module = loaded.model
    return inner


def _model(folder: Path, weights: Weights | None) -> nn.Module | Plan:
    found = packed_form(folder)
    if found is None or not native.available():
        return load_model(folder)
    if weights not in (None, found):
        raise ValueError(f"weights is {weights!r}, but {folder} holds weights in {found}")
    return load(folder)


def _runner(model: Any, weights: Weights | None, deterministic: bool) -> Runner:
    """Return the runner of a model: that of a plan if a plan can run it."""
    if not isinstance(model, Plan):
        model.eval()
        try:
            model = plan(model, weights or "fp32")
        except UnsupportedError:
            if weights is not None:
                raise
            return ModelRunner(model)
    model.steady = deterministic
    return PlanRunner(model)


def _weights_file(folder: Path) -> Path:
    for name in (WEIGHTS_FILE, PLAN_FILE):
        if (folder / name).exists():
            return folder / name
    raise ValueError(f"{folder} has no {WEIGHTS_FILE}")


def _digest(file: Path, form: str) -> str:
    """Return the SHA-256 of everything that states depend on."""
    config = file.with_name(CONFIG_FILE).read_text(encoding="utf-8")
    parts = [file_digest(file), config, form, LAYOUT, VERSION, unrolled.__version__]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _text(folder: Path, vocabulary: Vocabulary | None) -> Text | None:
    if vocabulary is None:
        return TokenizerText(folder)
    if vocabulary.kind == "tokenizer":
        return TokenizerText(folder, vocabulary)
    return VocabularyText(vocabulary, folder) if vocabulary.shape is None else None


def _description(model: Any, form: str) -> dict[str, Any]:
    """Return details of a model for people."""
    attention = getattr(model.config, "attention", None) or type(model).__name__
    mechanisms = [attention] if isinstance(attention, str) else list(dict.fromkeys(attention))
    found: dict[str, Any] = {"mechanisms": mechanisms, "weights": "fp32" if form == "model" else form}
    if isinstance(model, Plan):
        with Unfilled():
            model = Decoder(model.config)
    found["parameters"] = sum(x.numel() for x in model.parameters())
    return found

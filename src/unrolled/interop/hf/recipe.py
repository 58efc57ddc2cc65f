"""Linearize a model as one resumable job, from its folder to the folder of the linearized model."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from unrolled.contract import Dataset
from unrolled.files import read_object, write_file
from unrolled.folders import check_folder, writing_folder
from unrolled.interop.hf import digest
from unrolled.interop.hf.linearize import RECORD, linearize, linearized_layers, new_parameters, read_config
from unrolled.interop.hf.text import TokenizedText
from unrolled.interop.hf.transfer import LanguageModel, finetune, transfer
from unrolled.interop.hf.weights import attempt
from unrolled.ops.options import at_least
from unrolled.training import TrainConfig
from unrolled.training.checkpoint import fingerprint
from unrolled.training.evaluation import evaluate

LOSSES_FILE = "linearize.json"
EVALUATED_FILE = "evaluated.json"  # identifies the model and data of each loss


@dataclass(frozen=True)
class Recipe:
    """The mechanism that replaces softmax attention, and how to train it.

    Attributes:
        attention: name of the mechanism.
        options: options of the mechanism.
        layers: numbers of the layers to replace; None for all.
        transfer: settings of stage 1, or None to skip it.
        finetune: settings of stage 2, or None to skip it.
        lora: rank of the LoRA updates in stage 2; 0 trains all weights instead.
    """

    attention: str = "linear"
    options: dict[str, object] = field(default_factory=lambda: {"feature_map": "hedgehog"})
    layers: list[int] | None = None
    transfer: TrainConfig | None = field(default_factory=TrainConfig)
    finetune: TrainConfig | None = field(default_factory=TrainConfig)
    lora: int = 0

    def __post_init__(self) -> None:
        at_least(0, "lora", self.lora)
        if self.lora and self.finetune is None:
            raise ValueError(f"lora is {self.lora}, but must be 0 without fine-tuning")


def run(
    path: str,
    out: Path,
    files: Sequence[Path],
    recipe: Recipe,
    *,
    length: int = 256,
    val_fraction: float = 0.1,
    resume: bool = True,
    force: bool = False,
) -> dict[str, float]:
    """Linearize and train the causal language model at `path`, and save it with its tokenizer in `out`.

    The model is trained in fp32, and saved in the dtype that it had.

    Returns:
        Validation losses in nats per token: "before" and "right after" the replacement, and after the stages
        "transfer" and "finetune". They are also in `linearize.json`.

    Raises:
        ValueError: `out` holds something else and `force` is False, the model cannot be read or linearized,
            or the files are too short.
    """
    if Path(path).resolve() == out.resolve():
        raise ValueError(f"{out} is the model's own folder: name another one to write")
    config = read_config(path)
    if config.get(RECORD):
        raise ValueError(f"{path} was linearized before, but must be the model that it was made from")
    what = "a causal language model with a tokenizer"
    # In fp32, because small updates of 16-bit weights are rounded away.
    options = {"use_safetensors": True, "dtype": torch.float32}
    teacher = attempt(path, lambda: AutoModelForCausalLM.from_pretrained(path, **options), what)
    tokenizer = attempt(path, lambda: AutoTokenizer.from_pretrained(path), what)
    check_folder(out, f"this model of {path} linearized", lambda: _began_with(out, teacher), force=force)
    data = TokenizedText(files, tokenizer, length=length, val_fraction=val_fraction)
    _check_sizes(teacher, data)
    model, losses = train_linearized(teacher, data, recipe, out, resume=resume)
    with writing_folder(out) as folder:
        model.to(_saved_dtype(config)).save_pretrained(folder)  # type: ignore[arg-type]
        digest.seal(folder)
        tokenizer.save_pretrained(folder)
    return losses


def _check_sizes(model: PreTrainedModel, data: TokenizedText) -> None:
    """Raise ValueError if a model has too few learned positions or ids for a text."""
    tables = {name: x for name, x in model.named_modules() if isinstance(x, nn.Embedding)}
    for name, table in tables.items():
        if name.endswith(("wpe", "position_embeddings")) and data.length > table.num_embeddings:
            raise ValueError(
                f"length is {data.length}, but must be at most {table.num_embeddings}, the number of "
                "positions of the model"
            )
    n_ids = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    if data.largest_id >= n_ids:
        raise ValueError(f"the tokenizer makes the id {data.largest_id}, but the model has {n_ids} ids")


def _saved_dtype(config: Mapping[str, object]) -> torch.dtype:
    """Return the dtype of the weights in a folder, as its config says; fp32 if it does not."""
    found = getattr(torch, str(config.get("dtype", config.get("torch_dtype"))), None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _began_with(out: Path, teacher: PreTrainedModel) -> bool:
    """Whether a folder holds the results of an earlier `run` with the same teacher."""
    of = read_object(out / EVALUATED_FILE).get("before")
    return isinstance(of, list) and of[:1] == _plain([asdict(LanguageModel(teacher).config)])


def train_linearized(
    teacher: PreTrainedModel, data: Dataset, recipe: Recipe, out: Path, *, resume: bool = True
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Linearize a copy of `teacher` and train it by the recipe; return it and the losses, as in `run`.

    Stage 1 is skipped if the mechanism has no new parameters.
    """
    settings = recipe.finetune or recipe.transfer or TrainConfig()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = linearize(copy.deepcopy(teacher), recipe.attention, recipe.layers, **recipe.options)
    if not all(layer.mechanism.causal for layer in linearized_layers(model).values()):
        raise ValueError(
            f"the model is a {type(teacher).__name__} that reads in both directions, but must be a causal "
            "language model"
        )
    out.mkdir(parents=True, exist_ok=True)  # after `linearize`, which may refuse the model or the recipe
    known, evaluated = (read_object(out / name) if resume else {} for name in (LOSSES_FILE, EVALUATED_FILE))
    losses: dict[str, float] = {}
    batch = next(iter(data.eval_batches(settings.batch_size)), None)
    texts = None if batch is None else fingerprint(batch.inputs, batch.targets)

    def note(name: str, model: PreTrainedModel) -> None:
        """Evaluate a model, unless an earlier run has evaluated the same model."""
        judged = LanguageModel(model)
        of = _plain([asdict(judged.config), texts, settings.eval_batches])
        same = name in known and evaluated.get(name) == of
        losses[name] = float(str(known[name])) if same else evaluate(judged, data, settings)
        evaluated[name] = of

    def write(losses: Mapping[str, object]) -> None:
        for file, values in ((EVALUATED_FILE, evaluated), (LOSSES_FILE, losses)):  # the first names the model
            write_file(out / file, json.dumps(values, indent=1) + "\n")

    note("before", teacher)
    note("right after", model)
    if not known:
        write(losses)
    # A stage may refuse to go on from an earlier run; until it has begun, the files of that run stay.
    if recipe.transfer is not None and new_parameters(model):
        result = transfer(model, teacher, data, recipe.transfer, out / "transfer", resume=resume)
        write({**known, **losses})
        result.raise_if_interrupted()
        note("transfer", model)
    if recipe.finetune is not None:
        result = finetune(model, data, recipe.finetune, out / "finetune", lora=recipe.lora, resume=resume)
        write({**known, **losses})
        result.raise_if_interrupted()
        note("finetune", model)
    write(losses)
    return model.train(False), losses


def _plain(value: object) -> object:
    """Return a value after a round trip through JSON."""
    plain: object = json.loads(json.dumps(value))
    return plain
